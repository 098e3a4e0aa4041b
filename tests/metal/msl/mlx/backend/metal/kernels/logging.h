// In place of the header of the same name in MLX: nothing is logged here.
#pragma once

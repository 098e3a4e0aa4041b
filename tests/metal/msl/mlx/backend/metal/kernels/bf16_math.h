// In place of the header of the same name in MLX: math.h here has these overloads for bfloat.
#pragma once

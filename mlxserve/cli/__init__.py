"""The command line: where the parts are put together. One file per command group."""

"""The command line: the app and its commands, their help, and how the process ends."""

"""Where runs are started: the command line, and the Prefect server on this machine."""

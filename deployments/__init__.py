"""What flows run on: a Prefect server on this machine."""

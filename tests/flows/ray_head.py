"""A small Ray cluster on loopback, for as long as the standard input is open; prints its address."""

import logging
import os
import sys

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # As `flows.scoring` does for a cluster of its own.

import ray

context = ray.init(
    "local",
    num_cpus=2,
    num_gpus=1,  # In name only: what counts is how Ray deals it out.
    object_store_memory=80 * 2**20,
    include_dashboard=False,
    _node_ip_address="127.0.0.1",
    logging_level=logging.ERROR,
    log_to_driver=False,
)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()

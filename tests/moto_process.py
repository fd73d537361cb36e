"""A moto server that answers one request at a time: `python moto_process.py PORT`.

moto looks whether an object is there and then writes it; between the two another thread could do the same.
"""

import sys
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

application = DomainDispatcherApplication(create_backend_app)
one_at_a_time = threading.Lock()


def answer(environment, start_response):
    with one_at_a_time:
        return application(environment, start_response)


run_simple("127.0.0.1", int(sys.argv[1]), answer, threaded=True, request_handler=MotoRequestHandler)

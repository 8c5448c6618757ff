"""An S3 server in a process of its own, and a proxy before it that cuts, delays, truncates and refuses."""

import contextlib
import http.client
import os
import random
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

from loop.launch.machine import free_ports

BUCKET = "bucket"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
FAULTS = ("cut", "error", "slow down", "delay", "truncate", "lie", "lost answer")


class Server:
    """A server that can be killed and started again; what it holds is gone then."""

    def __init__(self):
        [self.port] = free_ports(1)
        self.process = None

    def start(self):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(self.command(), env={**os.environ, "TFLOOP_TESTS_COLD": "1"}, **quiet)
        for _ in range(600):
            with contextlib.suppress(OSError):
                urlopen(self.first_request(), timeout=5).read()
                return
            time.sleep(0.1)
        raise RuntimeError("the S3 server did not start")

    def command(self):
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def first_request(self):
        """Makes the bucket."""
        return Request(f"{self.endpoint}/{BUCKET}", method="PUT", headers=signed())

    def stop(self):
        self.process.kill()
        self.process.wait()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"


def signed():
    """Headers by which the server knows that S3 is meant."""
    credential = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
    return {"Authorization": f"{credential}, SignedHeaders=host, Signature=0", "x-amz-date": "20260101T000000Z"}


class Proxy:
    """Hands requests on to a server; each fails with a probability, in a way that is drawn.

    Attributes:
        share: the probability.
        down: whether no request is answered at all.
        faults: how many there were, by kind.
        pause: seconds before each answer about an object with data.
        cuts: how many of the next GETs of data are cut.
        ignores: the name of a header that the server doesn't see.
        creates_once: whether it refuses by itself to create an object that is there, before a server that can't.
    """

    def __init__(self, server, seed=0, share=0.0, creates_once=False):
        self.server = server
        self.share = share
        self.down = False
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.creating = threading.Lock()
        self.faults = dict.fromkeys(FAULTS, 0)
        self.pause = 0.0
        self.cuts = 0
        self.ignores = ""
        self.creates_once = creates_once
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def handle_any(self):
                proxy.answer(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # 5 otherwise: what comes beyond them waits for the network's own retries

        self.http = Listener(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def drawn(self, request):
        is_read = request.command == "GET" and "/data/" in request.path
        if "/data/" in request.path:
            time.sleep(self.pause)
        with self.lock:
            if is_read and self.cuts:
                self.cuts -= 1
                return "cut"
            if self.random.random() >= self.share:
                return ""
            fault = self.random.choice(FAULTS)
            self.faults[fault] += 1
            return fault

    def answer(self, request):
        size = int(request.headers.get("Content-Length", 0))
        body = request.rfile.read(size)
        fault = "cut" if self.down else self.drawn(request)
        request.close_connection = True
        if fault == "delay":
            time.sleep(0.3)
        elif fault == "cut":
            request.connection.close()
            return
        elif fault in ("error", "slow down"):
            code = "InternalError" if fault == "error" else "SlowDown"
            self.send(request, 500 if fault == "error" else 503, {}, f"<Error><Code>{code}</Code></Error>".encode())
            return
        headers = {name: value for name, value in request.headers.items() if name.lower() != self.ignores}
        try:
            status, headers, content = self.handed_on(request.command, request.path, body, headers)
        except (OSError, http.client.HTTPException):
            request.connection.close()
            return
        if fault == "lost answer":
            request.connection.close()
            return
        headers = {name: value for name, value in headers if name.lower() not in ("connection", "date")}
        self.send(request, status, headers, content, fault)

    def handed_on(self, method, path, body, headers):
        """The status, headers and content that the server answers with."""
        if not self.creates_once or "if-none-match" not in map(str.lower, headers):
            return self.asked(method, path, body, headers)
        with self.creating:
            status, *_ = self.asked("HEAD", path, b"", {})
            if status == 200:
                return 412, [], b"<Error><Code>PreconditionFailed</Code></Error>"
            return self.asked(method, path, body, headers)

    def asked(self, method, path, body, headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        try:
            connection.request(method, path, body, headers)
            found = connection.getresponse()
            return found.status, found.getheaders(), found.read()
        finally:
            connection.close()

    def send(self, request, status, headers, content, fault=""):
        headers = {name: value for name, value in headers.items() if name.lower() not in ("transfer-encoding",)}
        is_head = request.command == "HEAD"
        sent = content
        if fault == "truncate":  # an answer that looks whole, and isn't
            sent = content[: len(content) // 2]
        if not is_head:
            headers = {name: value for name, value in headers.items() if name.lower() != "content-length"}
            headers["Content-Length"] = str(len(sent) + 10 * (fault == "lie"))
        with contextlib.suppress(OSError):
            request.send_response(status)
            for name, value in headers.items():
                request.send_header(name, value)
            request.send_header("Connection", "close")  # or a client may send its next request to what just closes
            request.end_headers()
            if not is_head:
                request.wfile.write(sent)

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: a second thread costs more than it brings
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: tests of Ctrl-C would wait for ever
    signal.signal(signal.SIGINT, signal.default_int_handler)

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: a second thread costs more than it brings

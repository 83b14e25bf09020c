"""The nvlink backends: low-latency and normal dispatch and combine between the GPUs of one NVLink domain."""

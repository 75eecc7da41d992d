//! An in-process cluster for tests and the demo: API server, controllers, kubelet and container stand-ins.

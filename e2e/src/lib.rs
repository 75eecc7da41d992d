//! End-to-end tests: the scenario runner and the tests that take any KUBECONFIG.

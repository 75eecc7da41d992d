//! One node: kubelet and container runtime stand-ins.
//!
//! ```text
//!   API server  <--watch pods, patch status, delete--  kubelet/   one worker per pod
//!                                                        |  real gRPC over real unix sockets
//!                                                        |    plugins_registry/*.sock   registration
//!                                                        |    <endpoint of the plugin>  prepare, unprepare, health
//!                                                        v
//!                                                      container/ namespaces, a tmpfs root, CDI edits
//!   API server  --GET /containerLogs/<namespace>/<pod>/<container>-->  kubelet/logs.rs
//! ```
//!
//! As on a real cluster, the API server finds a pod's log through its Node object: the address
//! `InternalIP` and the port `status.daemonEndpoints.kubeletEndpoint.Port`, plain HTTP here.
//!
//! The runtime outlives the kubelet, so that a kubelet can be stopped and started under running
//! containers.
//!
//! Kinder than runc in one point: in a user namespace, runc looks for a device node on the host at
//! the path that it has in the container, whatever `hostPath` says.
//!
//! Simplified: no probes, no resource limits, no volumes but `emptyDir`, no network namespaces, no
//! CDI hooks (a spec that has any is refused, loudly), restart back-off is short and constant.

pub mod container;
pub mod kubelet;
pub mod namespaces;

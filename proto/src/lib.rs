//! The kubelet's gRPC: plugin registration, DRA v1 and v1beta1, device health.

//! The DRA kubelet plugin: one per node.

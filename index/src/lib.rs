//! Kubernetes objects in, allocator snapshot out; one writer.

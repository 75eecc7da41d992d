//! The interceptor library that holds a container to its grants.

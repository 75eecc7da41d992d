//! The allocating controller: one leader per cluster.

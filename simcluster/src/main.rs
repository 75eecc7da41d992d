//! tessera-simcluster
fn main() {}

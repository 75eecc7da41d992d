//! tessera-driver
fn main() {}

//! tessera-controller
fn main() {}

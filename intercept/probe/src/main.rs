//! tessera-probe
fn main() {}

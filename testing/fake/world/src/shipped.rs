//! The worlds of this crate.

/// A DGX-1V: eight V100 with their NVLink mesh.
pub const DGX_1V: &str = include_str!("../worlds/dgx-1v.yaml");
/// Eight H100 behind NVSwitches, two NUMA nodes.
pub const H100_8_NVSWITCH: &str = include_str!("../worlds/h100-8-nvswitch.yaml");
/// Four A100 PCIe, two NUMA nodes.
pub const A100_4_PCIE: &str = include_str!("../worlds/a100-4-pcie.yaml");
/// One T4.
pub const T4_1: &str = include_str!("../worlds/t4-1.yaml");
/// Two bridged A100, one A100 in MIG mode, two T4.
pub const MIXED: &str = include_str!("../worlds/mixed.yaml");

/// All worlds with their names.
pub const ALL: [(&str, &str); 5] = [
    ("dgx-1v", DGX_1V),
    ("h100-8-nvswitch", H100_8_NVSWITCH),
    ("a100-4-pcie", A100_4_PCIE),
    ("t4-1", T4_1),
    ("mixed", MIXED),
];

use std::collections::HashSet;

use super::*;

const WORLDS: [&str; 5] = [
    crate::shipped::DGX_1V,
    crate::shipped::H100_8_NVSWITCH,
    crate::shipped::A100_4_PCIE,
    crate::shipped::T4_1,
    crate::shipped::MIXED,
];

const ONE_GPU: &str = crate::shipped::T4_1;

fn world(text: &str) -> World {
    World::parse(text, "test").unwrap_or_else(|error| panic!("{error}"))
}

fn error_of(text: &str) -> String {
    World::parse(text, "test").unwrap_err().to_string()
}

#[test]
fn shipped_worlds_are_valid_with_unique_uuids() {
    let mut uuids = HashSet::new();
    for text in WORLDS {
        let world = world(text);
        assert!(!world.gpus.is_empty());
        for gpu in world.gpus {
            assert!(uuids.insert(gpu.uuid.clone()), "{} is in two worlds", gpu.uuid);
        }
    }
}

#[test]
fn dgx_1v_has_published_link_and_pcie_matrices() {
    let world = world(WORLDS[0]);
    let pix = |a: usize, b: usize| world.pcie_level(a, b).word();
    assert_eq!([pix(0, 0), pix(0, 1), pix(0, 2), pix(0, 4)], ["X", "PIX", "PHB", "SYS"]);
    assert_eq!([pix(5, 4), pix(5, 6), pix(7, 6)], ["PIX", "PHB", "PIX"]);
    assert_eq!(
        (world.direct_links(0, 3), world.direct_links(0, 1), world.direct_links(0, 5)),
        (2, 1, 0)
    );
    assert!(
        world.gpus.iter().all(|gpu| gpu.links.len() == 6),
        "a V100 has six links, all used in a DGX-1"
    );
}

#[test]
fn links_are_spread_over_all_switches() {
    let world = world(WORLDS[1]);
    for gpu in &world.gpus {
        assert_eq!(gpu.links.len(), 18);
        for switch in &world.switches {
            let count =
                gpu.links.iter().filter(|link| link.remote == NvLinkEnd::Switch(*switch)).count();
            assert!((4..=5).contains(&count));
        }
    }
    assert_eq!(
        (world.pcie_level(0, 1), world.pcie_level(3, 4)),
        (PcieLevel::Node, PcieLevel::System)
    );
}

#[test]
fn distinguishes_one_and_two_pcie_switches() {
    let text = WORLDS[4]
        .replace(r#""0000:18:08.0"]"#, r#""0000:18:08.0", "0000:1b:00.0", "0000:1c:01.0"]"#);
    assert_eq!(world(WORLDS[4]).pcie_level(0, 1), PcieLevel::Single);
    assert_eq!(world(&text).pcie_level(0, 1), PcieLevel::Multiple);
}

#[test]
fn errors_name_the_field() {
    let cases = [
        (ONE_GPU.replace("cuda:", "kuda:"), "kuda"),
        (ONE_GPU.replace("memoryMiB:", "memory:"), "memory"),
        (ONE_GPU.replace("model: t4", "model: t5"), "gpus[0].model"),
        (ONE_GPU.replace("uuid: GPU-", "uuid: GPU-x"), "gpus[0].uuid"),
        (ONE_GPU.replace("\"0000:00:1e.0\"", "nowhere"), "nowhere"),
        (ONE_GPU.replace("pcieRoot: \"pci0000:00\"", "pcieRoot: 00"), "gpus[0].pcieRoot"),
        (ONE_GPU.replace("bridges: []", "mig: true"), "gpus[0].mig"),
        (ONE_GPU.replace("memoryMiB: 15360", "memoryMiB: 100"), "models.t4.memoryMiB"),
        (ONE_GPU.replace("cuda: \"12.2\"", "cuda: twelve"), "driver.cuda"),
        (format!("{ONE_GPU}time: {{scale: -1}}\n"), "time.scale"),
        (format!("{ONE_GPU}nvlink: {{peers: [[0, 1], [1, 0]]}}\n"), "nvlink.peers"),
        (format!("{ONE_GPU}nvlink: {{peers: [[1]]}}\n"), "nvlink.peers[0][0]"),
        (
            format!("{ONE_GPU}nvlink: {{fabrics: [{{gpus: [3], switches: [\"0:1.0\"]}}]}}\n"),
            "nvlink.fabrics[0]",
        ),
        (WORLDS[4].replace("- [12, 0, 0", "- [11, 0, 0"), "nvlink.peers[0][1]"),
        (WORLDS[4].replace("12, 0", "13, 0").replace("[0, 12", "[0, 13"), "nvlink.peers[0]"),
    ];
    for (text, field) in cases {
        let message = error_of(&text);
        assert!(message.contains(field), "{message:?} does not name {field}");
    }
}

#[test]
fn kernels_take_whole_waves_of_blocks() {
    let world = world(ONE_GPU);
    let model = &world.gpus[0].model;
    let wave = u64::from(model.multiprocessors) * 16;
    assert_eq!(world.time.kernel_nanos(model, 1), 10_000);
    assert_eq!(world.time.kernel_nanos(model, wave), 10_000);
    assert_eq!(world.time.kernel_nanos(model, wave + 1), 20_000);
}

#[test]
fn cuda_version_number_is_nvidias() {
    let world = world(ONE_GPU);
    assert_eq!(world.driver.cuda_number(), 12_020);
    assert_eq!(world.driver.nvml_version(), "12.535.261.03");
}

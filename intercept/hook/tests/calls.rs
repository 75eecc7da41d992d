//! Every call that allocates memory is charged, and its release is credited.

mod container;

use container::{GIB, MIB, Node, set_up};
use tessera_test_support::test_name;

#[test]
fn every_allocating_call_is_charged_and_credited() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines = node.container(&[&node.share("claim-0", 0, GIB)]).run_c("calls", false, &[]);
    // Pools are charged in chunks of 32 MiB.
    let mut expected = vec![
        ("cuMemAlloc_v2", 3 * MIB),
        ("cuMemAllocManaged", 3 * MIB),
        ("cuMemAllocPitch_v2", MIB),
        ("cuMemAllocAsync", 32 * MIB),
        ("cuMemAllocAsync_ptsz", 32 * MIB),
        ("cuMemAllocAsync, cuMemFree_v2", 32 * MIB),
        ("cuMemAllocFromPoolAsync", 32 * MIB),
        ("cuMemAllocFromPoolAsync_ptsz", 32 * MIB),
        ("cuMemCreate", 4 * MIB),
        ("cuMemCreate on the host", 0),
        ("cuArrayCreate_v2", 4 * MIB),
        ("cuArray3DCreate_v2", 4 * MIB),
        ("cuMipmappedArrayCreate", 4 * MIB + MIB / 2),
        ("cuMemMap", 4 * MIB),
        ("cuCtxDestroy_v2", 5 * MIB),
        ("cuDevicePrimaryCtxReset_v2", 3 * MIB),
        ("cuDevicePrimaryCtxRelease_v2", 3 * MIB),
        ("errors", 0),
    ];
    for line in lines.iter().filter(|line| line.get("call").is_some()) {
        let at = expected.iter().position(|(call, _)| line["call"] == *call);
        let (call, bytes) = expected.remove(at.unwrap_or_else(|| panic!("expected: {line}")));
        assert_eq!((&line["charged"], &line["left"]), (&bytes.into(), &0.into()), "{call}");
    }
    assert!(expected.is_empty(), "missing: {expected:?}");
}

#[test]
fn errors_are_those_of_the_driver() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    let errors = |lines: Vec<serde_json::Value>| {
        lines.into_iter().filter(|line| line.get("error").is_some()).collect::<Vec<_>>()
    };
    let held = errors(node.container(&[&share]).run_c("calls", false, &[]));
    let free = errors(node.container_without_library().run_c("calls", false, &[]));
    assert_eq!(held.len(), 8);
    assert_eq!(held, free);
}

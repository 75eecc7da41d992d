use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::machines::{all_pairs, dgx1v_links, gpu, nvlink, unlinked, uuid};

/// Cliques as indices, of GPUs 0 to `count`.
fn cliques(count: u32, links: &[Link]) -> Vec<Vec<u32>> {
    let gpus: Vec<GpuUuid> = (0..count).map(uuid).collect();
    let index =
        |member: &GpuUuid| gpus.iter().position(|gpu| gpu == member).expect("a GPU of ours") as u32;
    nvlink_cliques(&gpus, links)
        .iter()
        .map(|clique| clique.members.iter().map(index).collect())
        .collect()
}

#[test]
fn gpus_behind_nvswitches_are_one_clique() {
    assert_eq!(cliques(8, &all_pairs(8, 18)), [[0, 1, 2, 3, 4, 5, 6, 7]]);
}

#[test]
fn the_mesh_of_a_dgx_1_falls_into_its_two_quads() {
    assert_eq!(cliques(8, &dgx1v_links()), [[0, 1, 2, 3], [4, 5, 6, 7]]);
}

#[test]
fn bridged_pairs_are_cliques_wherever_they_sit() {
    assert_eq!(cliques(4, &[nvlink(1, 2, 2), nvlink(0, 3, 2)]), [[0, 3], [1, 2]]);
}

#[test]
fn a_chain_falls_into_pairs_lowest_first_and_a_gpu_left_alone_is_in_none() {
    assert_eq!(
        cliques(5, &[nvlink(0, 1, 1), nvlink(1, 2, 1), nvlink(2, 3, 1), nvlink(3, 4, 1)]),
        [[0, 1], [2, 3]]
    );
}

#[test]
fn the_largest_clique_goes_first_even_with_higher_members() {
    let links = [nvlink(0, 1, 4), nvlink(1, 2, 1), nvlink(2, 3, 1), nvlink(1, 3, 1)];
    assert_eq!(cliques(4, &links), [vec![1, 2, 3]]);
}

#[test]
fn pcie_and_zero_nvlinks_join_nothing() {
    let links = [Link::new(uuid(0), uuid(1), LinkKind::Pcie(PcieLevel::Single)), nvlink(1, 2, 0)];
    assert_eq!(cliques(3, &links), Vec::<Vec<u32>>::new());
}

#[test]
fn a_graph_without_structure_is_still_partitioned_quickly() {
    // 48 GPUs in 16 triples, joined to all but their own triple: 3^16 maximal cliques.
    let links: Vec<Link> = (0..48)
        .flat_map(|a| (a + 1..48).map(move |b| (a, b)))
        .filter(|(a, b)| a / 3 != b / 3)
        .map(|(a, b)| nvlink(a, b, 1))
        .collect();
    let found = cliques(48, &links);
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [16, 16, 16]);
}

#[test]
fn what_cannot_be_published_is_set_aside_with_its_reason() {
    let mig = Gpu { mig: Some(Mig::default()), ..gpu(1) };
    let tiny = Gpu { memory_bytes: (2 << 20) - 1, ..gpu(2) };
    let twin = Gpu { uuid: uuid(0), ..gpu(3) };
    let inventory = Inventory::new(vec![twin, tiny, mig, gpu(0)], all_pairs(4, 2), Vec::new());
    assert_eq!(inventory.gpus, [gpu(0)]);
    assert_eq!(inventory.links, []);
    let reasons: Vec<&str> = inventory.unpublished.iter().map(|gpu| gpu.reason.code()).collect();
    assert_eq!(reasons, ["MigEnabled", "NoMemory", "DuplicateUuid"]);
    assert_eq!(inventory.unpublished_by_reason().get("MigEnabled"), Some(&1));
}

#[test]
fn an_excluded_gpu_takes_its_links_along() {
    let inventory = Inventory::new(vec![gpu(2), gpu(1), gpu(0)], all_pairs(3, 2), Vec::new());
    let rest = inventory.excluding(&BTreeSet::from([uuid(1)]));
    assert_eq!(rest.gpus, [gpu(0), gpu(2)]);
    assert_eq!(rest.links, [nvlink(0, 2, 2)]);
    assert_eq!(rest.unpublished[0].reason, UnpublishedReason::Excluded);
    assert!(rest.gpu(&uuid(1)).is_none() && rest.gpu(&uuid(2)).is_some());
}

#[test]
fn a_link_said_twice_counts_once_and_the_better_word_holds() {
    let links = vec![
        nvlink(1, 0, 2),
        nvlink(0, 1, 4),
        Link::new(uuid(1), uuid(0), LinkKind::Pcie(PcieLevel::Node)),
    ];
    let inventory = Inventory::new(vec![gpu(0), gpu(1)], links, Vec::new());
    assert_eq!(
        inventory.links,
        [Link::new(uuid(0), uuid(1), LinkKind::Pcie(PcieLevel::Node)), nvlink(0, 1, 4)]
    );
}

#[test]
fn versions_of_nvidia_become_semver() {
    let normal = |text: &str| normalise_version(text).map(|version| version.to_string());
    assert_eq!(normal("580.95.05").as_deref(), Some("580.95.5"));
    assert_eq!(normal("13.0").as_deref(), Some("13.0.0"));
    assert_eq!(normal("570").as_deref(), Some("570.0.0"));
    assert_eq!(normal("470.103.01.02").as_deref(), Some("470.103.1"));
    assert_eq!(normal(" 535.104.05-grid ").as_deref(), Some("535.104.5"));
    assert_eq!(normal("Not Available"), None);
    assert_eq!(normal("99999999999999999999.0"), None);
    assert_eq!(CudaVersion::from_number(12090).to_string(), "12.9.0");
    assert_eq!(CudaVersion { major: 12, minor: 9 }.number(), 12090);
}

proptest! {
    #[test]
    fn a_normalised_version_is_strict_semver(text in "[0-9]{1,4}(\\.[0-9]{1,3}){0,4}[a-z-]{0,4}") {
        let version = normalise_version(&text).expect("it begins with a number");
        prop_assert_eq!(semver::Version::parse(&version.to_string()).ok(), Some(version));
    }

    #[test]
    fn cliques_are_disjoint_and_complete_and_shrink(pairs in prop::collection::btree_set((0_u32..10, 0_u32..10), 0..45)) {
        let links: Vec<Link> = pairs.iter().filter(|(a, b)| a != b).map(|(a, b)| nvlink(*a, *b, 1)).collect();
        let joined = |a: u32, b: u32| pairs.contains(&(a, b)) || pairs.contains(&(b, a));
        let found = cliques(10, &links);
        let mut seen = BTreeSet::new();
        for clique in &found {
            prop_assert!(clique.len() >= 2);
            for (at, a) in clique.iter().enumerate() {
                prop_assert!(seen.insert(*a), "{} is in two cliques", a);
                prop_assert!(clique[at + 1..].iter().all(|b| a < b && joined(*a, *b)));
            }
        }
        prop_assert!(found.windows(2).all(|pair| pair[0].len() >= pair[1].len()));
        // Nothing is left that could still be paired.
        let alone: Vec<u32> = (0..10).filter(|gpu| !seen.contains(gpu)).collect();
        prop_assert!(alone.iter().all(|a| alone.iter().all(|b| a == b || !joined(*a, *b))));
    }

    #[test]
    fn an_inventory_loses_no_gpu(mig in prop::collection::vec(any::<bool>(), 0..12)) {
        let gpus: Vec<Gpu> = mig.iter().zip(0..).map(|(mig, index)| Gpu { mig: mig.then(Mig::default), ..gpu(index) }).collect();
        let inventory = Inventory::new(gpus, Vec::new(), Vec::new());
        prop_assert_eq!(inventory.gpus.len() + inventory.unpublished.len(), mig.len());
        prop_assert!(inventory.gpus.is_sorted_by_key(|gpu| gpu.index));
    }
}

#[test]
fn gpus_come_in_order_of_their_index() {
    assert_eq!(Inventory::new(vec![gpu(1), gpu(0)], Vec::new(), Vec::new()), unlinked(2));
}

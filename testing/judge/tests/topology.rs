//! Figures of `topology`: calculated by hand, and published ones.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use proptest::prelude::*;
use tessera_allocator::topology::{DeviceSet, LinkMatrix};
use tessera_judge::topology::Clairvoyant;
use tessera_judge::topology::machines::{self, Machine};
use tessera_judge::topology::per_request::{self, PerRequest};
use tessera_judge::topology::policies::{CachedPolicy, PolicyName};
use tessera_judge::topology::sequence::{self, Sequences, Sizes};
use tessera_test_support::data;

/// Four GPUs: 0 and 3 have two NVLinks, as have 1 and 2; 0 and 1 share a NUMA node, as do 2 and 3.
const TWO_BRIDGES: &str = r#"{"bridges": {"n": 4, "source": "by hand",
    "nvlink": [[0, 0, 0, 2], [0, 0, 2, 0], [0, 2, 0, 0], [2, 0, 0, 0]],
    "pcie": [["X", "NODE", "SYS", "SYS"], ["NODE", "X", "SYS", "SYS"], ["SYS", "SYS", "X", "NODE"], ["SYS", "SYS", "NODE", "X"]],
    "numa": [0, 0, 1, 1]}}"#;

fn bridges() -> Arc<LinkMatrix> {
    Arc::new(machines::parse(TWO_BRIDGES).unwrap().remove(0).matrix)
}

/// Returns the machines of `testing/data/topology`.
fn real_machines() -> Vec<Machine> {
    machines::read(&data::directory().join("topology/machines.json")).unwrap()
}

fn expected(matrix: &Arc<LinkMatrix>, name: PolicyName, sizes: &[usize]) -> Sequences {
    let mut policy = name.on(matrix, 0);
    let mut clairvoyant = Clairvoyant::new(Arc::clone(matrix)).unwrap();
    let sizes = Sizes::new(sizes.to_vec()).unwrap();
    sequence::expected(matrix, &mut CachedPolicy::new(policy.as_mut()), &mut clairvoyant, &sizes)
}

fn close(value: f64, other: f64) -> bool {
    (value - other).abs() < 0.0005
}

#[test]
fn clairvoyant_finds_the_optimum() {
    let mut clairvoyant = Clairvoyant::new(bridges()).unwrap();
    assert_eq!(clairvoyant.best(&[2, 2]), 420);
    assert_eq!(clairvoyant.best(&[1, 2, 1]), 210);
    // Three GPUs have one bridge (210), one pair in a NUMA node (20) and one pair across (10).
    assert_eq!(clairvoyant.best(&[3, 1]), 240);
    assert_eq!(clairvoyant.best(&[4]), 2 * 210 + 2 * 20 + 2 * 10);
    assert_eq!(clairvoyant.best(&[]), 0);
}

#[test]
fn pairs_by_first_fit_reach_40_of_420() {
    let first_fit = expected(&bridges(), PolicyName::FirstFit, &[2]);
    assert!(close(first_fit.ratio(), 40.0 / 420.0), "{first_fit:?}");
    assert_eq!(first_fit.weakest_pair, Some(20));
    assert!(close(first_fit.mean_weakest_pair(), 20.0));
    assert_eq!(expected(&bridges(), PolicyName::Greedy, &[2]).ratio(), 1.0);
}

#[test]
fn residual_value_keeps_bridges_that_greedy_breaks() {
    // Sizes until the first that does not fit, with the final scores (greedy, clairvoyant): 2 2 *
    // -> 420, 420 (1/4); 2 1 1 * -> 210 (1/8); 1 1 1 1 and 1 1 1 2 -> 0 (1/8); 2 1 2 -> 210,
    // 210 (1/8); 1 1 2 -> 20 (only 2-3 is free), 210 (1/8); 1 2 1 and 1 2 2 -> 210, 210 (1/4).
    let greedy = expected(&bridges(), PolicyName::Greedy, &[1, 2]);
    let (tessera, best) = (105.0 + 52.5 + 2.5 + 52.5, 105.0 + 52.5 + 26.25 + 52.5);
    assert!(close(greedy.ratio(), tessera / best), "{greedy:?}");
    assert_eq!(expected(&bridges(), PolicyName::Tessera, &[1, 2]).ratio(), 1.0);
}

#[test]
fn samples_match_expectation() {
    let matrix = bridges();
    let mut clairvoyant = Clairvoyant::new(Arc::clone(&matrix)).unwrap();
    let sizes = Sizes::new(vec![1, 2, 3, 4]).unwrap();
    let mut sample = |seed| {
        let mut policy = PolicyName::FirstFit.on(&matrix, 0);
        sequence::sampled(&matrix, policy.as_mut(), &mut clairvoyant, &sizes, (seed, 20_000))
    };
    let exact = expected(&matrix, PolicyName::FirstFit, &[1, 2, 3, 4]).ratio();
    assert!((sample(1).ratio() - exact).abs() < 0.01, "{} {exact}", sample(1).ratio());
    assert_eq!(sample(2), sample(2));
    assert_ne!(sample(2), sample(3));
}

#[test]
fn measures_one_request_per_set_of_free_gpus() {
    // Pairs on the eleven sets of two or more GPUs. First fit takes 0-1 (20) on five of them, four
    // of which have a pair with 210.
    let matrix = bridges();
    let mut first_fit = PolicyName::FirstFit.on(&matrix, 0);
    let result = per_request::measure(&matrix, first_fit.as_mut(), 2).unwrap();
    // {01} {02} {13} {23} {03} {12}: 1. {012}: 20/210. {013}: 20/210. {023}: 10/210. {123}: 1.
    // {0123}: 20/210.
    let mean = (6.0 + 20.0 / 210.0 * 3.0 + 10.0 / 210.0 + 1.0) / 11.0;
    assert!(
        close(result.mean, mean)
            && close(result.optimal, 7.0 / 11.0)
            && close(result.worst, 10.0 / 210.0)
    );
    let mut greedy = PolicyName::Greedy.on(&matrix, 0);
    let best = per_request::measure(&matrix, greedy.as_mut(), 2).unwrap();
    assert_eq!(best, PerRequest { size: 2, mean: 1.0, optimal: 1.0, worst: 1.0 });
    assert_eq!(per_request::measure(&matrix, greedy.as_mut(), 5), None);
}

#[test]
fn data_has_nine_machines() {
    let machines = real_machines();
    let names: Vec<(&str, usize)> =
        machines.iter().map(|m| (m.name.as_str(), m.matrix.devices().len())).collect();
    let expected = [
        ("dgx1p", 8),
        ("dgx1v", 8),
        ("dgx2_16", 16),
        ("dgxa100", 8),
        ("h100sxm4", 4),
        ("hgxh100", 8),
        ("l40s4", 4),
        ("pcie8", 8),
        ("rtx8000x4", 4),
    ];
    assert_eq!(names, expected);
}

#[test]
fn dgx_1v_reproduces_published_figures() {
    let machine = real_machines().into_iter().find(|machine| machine.name == "dgx1v").unwrap();
    let matrix = Arc::new(machine.matrix);
    let mut best_effort = PolicyName::BestEffort.on(&matrix, 0);
    let pairs = per_request::measure(&matrix, best_effort.as_mut(), 2).unwrap();
    assert!(close(pairs.optimal, 0.858) && close(pairs.worst, 0.652), "{pairs:?}");
    let ratio = |name| expected(&matrix, name, &[1, 2, 3, 4]).ratio();
    // Published: .989, .982, .778, from samples of unpublished size.
    assert!((ratio(PolicyName::BestEffort) - 0.989).abs() < 0.003);
    assert!((ratio(PolicyName::Greedy) - 0.982).abs() < 0.003);
    assert!((ratio(PolicyName::FirstFit) - 0.778).abs() < 0.012);
    assert!(ratio(PolicyName::Tessera) >= 0.992);
    let mut tessera = PolicyName::Tessera.on(&matrix, 0);
    assert!(per_request::measure(&matrix, tessera.as_mut(), 2).unwrap().worst >= 0.8);
}

#[test]
fn rejects_inconsistent_machines() {
    let problem = |text: &str| format!("{:#}", machines::parse(text).unwrap_err());
    let broken = |from: &str, to: &str| problem(&TWO_BRIDGES.replacen(from, to, 1));
    assert_eq!(broken("\"n\": 4", "\"n\": 5"), "machine bridges: nvlink is not 5 rows of 5");
    assert_eq!(broken("\"n\": 4", "\"n\": 65"), "machine bridges: n is 65, but must be 1 to 64");
    assert_eq!(broken("[0, 0, 0, 2]", "[0, 0, 0]"), "machine bridges: nvlink is not 4 rows of 4");
    assert_eq!(broken("[\"X\", ", "[\"X\", \"X\", "), "machine bridges: pcie is not 4 rows of 4");
    assert_eq!(broken("[0, 0, 1, 1]", "[0, 0, 1]"), "machine bridges: numa lists 3 GPUs, not 4");
    assert_eq!(
        broken("[0, 0, 0, 2]", "[0, 0, 0, 1]"),
        "machine bridges: links of GPUs 0 and 3 differ by direction"
    );
    assert_eq!(
        broken("\"NODE\"", "\"NEAR\""),
        "machine bridges: pcie[0][1]: `NEAR` is not a PCIe level; known are SYS, NODE, PHB, PXB, PIX and PSB"
    );
    assert!(problem("[]").starts_with("not a list of machines"));
}

fn small_machines() -> impl Strategy<Value = Arc<LinkMatrix>> {
    let words = prop::sample::select(vec!["SYS", "NODE", "PHB", "PXB", "PIX", "PSB"]);
    (2usize..7, prop::collection::vec((0u32..3, words), 36)).prop_map(|(n, pairs)| {
        let cell = |a: usize, b: usize| &pairs[a.min(b) * 6 + a.max(b)];
        let row = |of: &dyn Fn(usize, usize) -> serde_json::Value| -> serde_json::Value {
            (0..n).map(|a| (0..n).map(|b| of(a, b)).collect::<serde_json::Value>()).collect()
        };
        let machine = serde_json::json!({"m": {
            "n": n,
            "nvlink": row(&|a, b| if a == b { 0.into() } else { cell(a, b).0.into() }),
            "pcie": row(&|a, b| if a == b { "X".into() } else { cell(a, b).1.into() }),
            "numa": vec![0; n],
        }});
        Arc::new(machines::parse(&machine.to_string()).unwrap().remove(0).matrix)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn clairvoyant_bounds_all_policies_and_tessera_matches_greedy(matrix in small_machines()) {
        let tessera = expected(&matrix, PolicyName::Tessera, &[1, 2, 3, 4]).ratio();
        let greedy = expected(&matrix, PolicyName::Greedy, &[1, 2, 3, 4]).ratio();
        let first_fit = expected(&matrix, PolicyName::FirstFit, &[1, 2, 3, 4]).ratio();
        for ratio in [tessera, greedy, first_fit] {
            prop_assert!(ratio <= 1.0 + 1e-9, "{ratio}");
        }
        // Scores are whole points, so that a sequence may lose some.
        prop_assert!(tessera >= greedy.max(first_fit) - 0.01, "{tessera} {greedy} {first_fit}");
    }

    #[test]
    fn every_policy_chooses_requested_number_of_free_gpus(matrix in small_machines(), bits in 1u64..64, count in 1usize..7) {
        let free = DeviceSet::from_bits(bits) & matrix.devices();
        let names = [
            PolicyName::Tessera, PolicyName::Learning, PolicyName::Estimate, PolicyName::BestEffort,
            PolicyName::Greedy, PolicyName::FirstFit, PolicyName::Random,
        ];
        for name in names.into_iter().filter(|_| count <= free.len()) {
            let set = name.on(&matrix, 3).choose(free, count);
            prop_assert!(set.len() == count && set.is_subset(free), "{name:?} {set:?}");
        }
    }
}

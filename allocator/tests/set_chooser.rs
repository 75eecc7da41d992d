//! Choice of device sets by topology.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use tessera_allocator::topology::{
    DeviceLinks, DeviceLocation, DeviceSet, LinkMatrix, OutOfSteps, ResidualValue, SetChoice,
    SetChooser, SetRequest, SizeMix, TooManyDevices, TopologyPreferences,
};
use tessera_api::config::{TopologyMode, TopologyScope, TopologyTerm};
use tessera_api::gpu::PcieLevel;

/// A machine under construction: without NVLinks, PCIe across sockets, unknown locations.
#[derive(Debug)]
struct Machine {
    places: Vec<DeviceLocation>,
    pairs: Vec<Vec<DeviceLinks>>,
}

impl Machine {
    fn of(count: usize) -> Self {
        let pair = DeviceLinks { nvlinks: 0, pcie: PcieLevel::System };
        Self {
            places: vec![DeviceLocation::default(); count],
            pairs: vec![vec![pair; count]; count],
        }
    }

    fn nvlinks(mut self, count: u32, pairs: &[(usize, usize)]) -> Self {
        for &(a, b) in pairs {
            self.pairs[a][b].nvlinks = count;
            self.pairs[b][a].nvlinks = count;
        }
        self
    }

    fn pcie(mut self, level: PcieLevel, pairs: &[(usize, usize)]) -> Self {
        for &(a, b) in pairs {
            self.pairs[a][b].pcie = level;
            self.pairs[b][a].pcie = level;
        }
        self
    }

    fn numa(mut self, nodes: &[u32]) -> Self {
        for (place, node) in self.places.iter_mut().zip(nodes) {
            place.numa_node = Some(*node);
        }
        self
    }

    fn pcie_roots(mut self, roots: &[u32]) -> Self {
        for (place, root) in self.places.iter_mut().zip(roots) {
            place.pcie_root = Some(*root);
        }
        self
    }

    fn matrix(&self) -> Arc<LinkMatrix> {
        Arc::new(LinkMatrix::new(&self.places, |a, b| self.pairs[a][b]).unwrap())
    }

    /// Returns the same machine with its devices in another order.
    fn reordered(&self, order: &[usize]) -> Self {
        Self {
            places: order.iter().map(|&old| self.places[old]).collect(),
            pairs: order
                .iter()
                .map(|&a| order.iter().map(|&b| self.pairs[a][b]).collect())
                .collect(),
        }
    }
}

/// Four GPUs with two NVLinks between 0 and 3 and between 1 and 2.
///
/// 0 and 1 are on one socket, 2 and 3 on the other.
fn two_bridges() -> Machine {
    Machine::of(4)
        .nvlinks(2, &[(0, 3), (1, 2)])
        .pcie(PcieLevel::Node, &[(0, 1), (2, 3)])
        .numa(&[0, 0, 1, 1])
}

/// Two quads, each with a full mesh, and a link from each GPU to one of the other quad.
fn dgx1v() -> Machine {
    Machine::of(8)
        .nvlinks(1, &[(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)])
        .nvlinks(2, &[(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)])
        .pcie(PcieLevel::Single, &[(0, 1), (2, 3), (4, 5), (6, 7)])
        .pcie(
            PcieLevel::HostBridge,
            &[(0, 2), (0, 3), (1, 2), (1, 3), (4, 6), (4, 7), (5, 6), (5, 7)],
        )
        .numa(&[0, 0, 0, 0, 1, 1, 1, 1])
}

/// Machines of eight fully linked GPUs each, without links between them.
fn boxes(count: usize) -> Machine {
    let within = (0..count * 8).flat_map(|a| (a + 1..(a / 8 + 1) * 8).map(move |b| (a, b)));
    Machine::of(count * 8).nvlinks(18, &within.collect::<Vec<_>>())
}

fn set(devices: &[usize]) -> DeviceSet {
    devices.iter().copied().collect()
}

fn chooser(machine: &Machine) -> SetChooser {
    SetChooser::new(machine.matrix(), &SizeMix::default())
}

fn request(count: usize, free: DeviceSet) -> SetRequest {
    SetRequest { count, candidates: free, free, preferences: TopologyPreferences::default() }
}

fn choose(chooser: &SetChooser, request: &SetRequest) -> Option<SetChoice> {
    chooser.choose(request, &mut u64::MAX.clone()).unwrap()
}

fn all_sets(of: DeviceSet, count: usize) -> Vec<DeviceSet> {
    let every = (0..=of.bits()).map(DeviceSet::from_bits);
    every.filter(|set| set.len() == count && set.is_subset(of)).collect()
}

#[test]
fn set_score_sums_nvlinks_and_pcie_levels() {
    let matrix = dgx1v().matrix();
    // 0-1: 100 + 50, 0-2: 100 + 30, 0-3: 200 + 30, 1-2: 200 + 30, 1-3: 100 + 30, 2-3: 200 + 50.
    assert_eq!(matrix.score(set(&[0, 1, 2, 3])), 150 + 130 + 230 + 230 + 130 + 250);
    assert_eq!(matrix.weakest_pair(set(&[0, 1, 2, 3])), Some(130));
    assert_eq!(matrix.score(set(&[0, 5])), 10);
    assert_eq!((matrix.score(set(&[6])), matrix.weakest_pair(set(&[6]))), (0, None));
    let board = Machine::of(2).pcie(PcieLevel::Board, &[(0, 1)]).matrix();
    assert_eq!(board.score(board.devices()), 60);
}

#[test]
fn residual_value_is_expected_sum_of_scores() {
    let matrix = two_bridges().matrix();
    let points = |counts: &[u64], free: &[usize]| {
        ResidualValue::new(&matrix, &SizeMix::new(counts)).points(&matrix, set(free))
    };
    // Pairs only: both bridges (210 each), or the remaining devices.
    assert_eq!(points(&[0, 1], &[0, 1, 2, 3]), 420.0);
    assert_eq!(points(&[0, 1], &[0, 1, 2]), 210.0);
    assert_eq!(points(&[0, 1], &[0, 1]), 20.0);
    // One or two devices, equally often: a pair of {0, 3} scores 210 in half of the cases.
    assert_eq!(points(&[1, 1], &[0, 3]), 105.0);
    // A pair of {0, 1, 3} scores 210; a single GPU is taken beside the bridge and leaves 105.
    assert_eq!(points(&[1, 1], &[0, 1, 3]), 0.5 * 210.0 + 0.5 * 105.0);
    assert_eq!(points(&[1, 1], &[2]), 0.0);
}

#[test]
fn single_gpu_breaks_no_nvlink_pair() {
    let chooser = chooser(&two_bridges());
    assert_eq!(choose(&chooser, &request(1, set(&[0, 1, 3]))).unwrap().devices, set(&[1]));
    assert_eq!(choose(&chooser, &request(1, set(&[0, 1, 2]))).unwrap().devices, set(&[0]));
}

#[test]
fn residual_value_decides_between_pairs_above_floor() {
    // 0-3 has two links, but without 0 and 3 the quad is broken; 4 and 5 have one link and no
    // others.
    let machine = Machine::of(6)
        .nvlinks(2, &[(0, 3), (0, 1), (0, 2), (1, 2), (1, 3), (2, 3)])
        .nvlinks(1, &[(4, 5)])
        .pcie(PcieLevel::Board, &[(4, 5)])
        .pcie(PcieLevel::Single, &[]);
    let choice = choose(&chooser(&machine), &request(2, machine.matrix().devices())).unwrap();
    // 160 is below four fifths of 210: the current request keeps the better set.
    assert_eq!(choice.score, 210);
    let machine =
        machine.nvlinks(2, &[(4, 5)]).nvlinks(2, &[(0, 1)]).pcie(PcieLevel::Single, &[(0, 1)]);
    let choice = choose(&chooser(&machine), &request(2, machine.matrix().devices())).unwrap();
    // 260 on 4-5; 250 on 0-1 would also break the quad.
    assert_eq!((choice.devices, choice.score), (set(&[4, 5]), 260));
    let machine = machine.pcie(PcieLevel::System, &[(4, 5)]);
    let choice = choose(&chooser(&machine), &request(2, machine.matrix().devices())).unwrap();
    assert_eq!(
        (choice.devices, choice.score),
        (set(&[4, 5]), 210),
        "250 is possible, and breaks the quad"
    );
}

#[test]
fn shared_gpu_is_chosen_before_free_one() {
    let machine = Machine::of(4).nvlinks(1, &[(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]);
    let shared = SetRequest { free: set(&[0, 1, 3]), ..request(1, machine.matrix().devices()) };
    assert_eq!(choose(&chooser(&machine), &shared).unwrap().devices, set(&[2]));
}

#[test]
fn required_nvlink_holds_for_every_pair() {
    let chooser = chooser(&dgx1v());
    let nvlink = TopologyPreferences::new(&[TopologyTerm {
        scope: TopologyScope::NvLink,
        mode: TopologyMode::Require,
    }]);
    let of =
        |count, free: &[usize]| SetRequest { preferences: nvlink, ..request(count, set(free)) };
    assert_eq!(choose(&chooser, &of(3, &[0, 1, 2, 4, 5])).unwrap().devices, set(&[0, 1, 2]));
    assert_eq!(choose(&chooser, &of(4, &[0, 1, 2, 4, 5])), None);
    assert_eq!(choose(&chooser, &of(5, &[0, 1, 2, 3, 4, 5, 6, 7])), None);
    assert_eq!(choose(&chooser, &of(1, &[7])).unwrap().devices, set(&[7]));
}

#[test]
fn shortfall_counts_groups_per_required_scope() {
    let machine = dgx1v();
    let preferences =
        TopologyPreferences::default().require(TopologyScope::NvLink).require(TopologyScope::Numa);
    let asked = SetRequest { preferences, ..request(4, set(&[0, 1, 2, 4, 5, 6, 7])) };
    let shortfall = chooser(&machine).shortfall(&SetRequest { count: 5, ..asked });
    assert_eq!((shortfall.count, shortfall.candidates, shortfall.largest_group), (5, 7, 4));
    let groups: Vec<_> = shortfall.scopes.iter().map(|s| (s.scope, s.groups.clone())).collect();
    assert_eq!(groups, [(TopologyScope::NvLink, vec![4, 3]), (TopologyScope::Numa, vec![4, 3])]);
}

#[test]
fn device_without_location_shares_no_scope() {
    let mut machine = Machine::of(3).numa(&[0, 0, 0]).pcie_roots(&[7, 7, 7]);
    machine.places[1] = DeviceLocation::default();
    let chooser = chooser(&machine);
    for scope in [TopologyScope::Numa, TopologyScope::Pcie] {
        let asked = SetRequest {
            preferences: TopologyPreferences::default().require(scope),
            ..request(2, set(&[0, 1, 2]))
        };
        assert_eq!(choose(&chooser, &asked).unwrap().devices, set(&[0, 2]), "{scope}");
        assert_eq!(choose(&chooser, &SetRequest { count: 3, ..asked }), None);
    }
}

#[test]
fn preferred_scope_precedes_score_and_is_optional() {
    let chooser = chooser(&two_bridges());
    let numa = TopologyPreferences::default().prefer(TopologyScope::Numa);
    let asked = SetRequest { preferences: numa, ..request(2, set(&[0, 1, 2, 3])) };
    assert_eq!(choose(&chooser, &asked).unwrap().devices, set(&[0, 1]));
    let asked = SetRequest { preferences: numa, ..request(2, set(&[0, 3])) };
    assert_eq!(choose(&chooser, &asked).unwrap().devices, set(&[0, 3]));
    let nvlink = TopologyPreferences::default().prefer(TopologyScope::NvLink);
    let asked = SetRequest { preferences: nvlink, ..request(2, set(&[0, 1, 3])) };
    assert_eq!(choose(&chooser, &asked).unwrap().devices, set(&[0, 3]));
}

#[test]
fn refuses_more_devices_than_matrix_supports() {
    let pair = |_, _| DeviceLinks { nvlinks: 0, pcie: PcieLevel::System };
    assert_eq!(LinkMatrix::new(&[DeviceLocation::default(); 65], pair), Err(TooManyDevices(65)));
    assert_eq!(LinkMatrix::new(&[DeviceLocation::default(); 64], pair).unwrap().len(), 64);
}

#[test]
fn oversized_request_has_no_set_and_empty_one_has_empty_set() {
    let chooser = chooser(&two_bridges());
    assert_eq!(choose(&chooser, &request(3, set(&[0, 1]))), None);
    assert_eq!(choose(&chooser, &request(0, set(&[0, 1]))).unwrap().devices, DeviceSet::EMPTY);
    let elsewhere = request(2, set(&[0, 17, 63]));
    assert_eq!(choose(&chooser, &elsewhere), None, "positions beyond the machine are ignored");
}

#[test]
fn branch_and_bound_finds_one_machine_within_steps() {
    // One more link between neighbors, so that no two devices are twins and there are too many sets
    // to enumerate.
    let more: Vec<_> = (0..63).filter(|a| a % 8 < 7).map(|a| (a, a + 1)).collect();
    let machine = boxes(8).nvlinks(19, &more);
    let chooser = chooser(&machine);
    assert_eq!(machine.matrix().twins().len(), 64);
    let mut steps = 100_000;
    let free = machine.matrix().devices() - set(&[0, 9, 10, 20, 25, 33, 34, 41, 57]);
    let choice = chooser.choose(&request(8, free), &mut steps).unwrap().unwrap();
    assert_eq!(choice.devices, (48..56).collect());
    assert!(steps < 100_000);
    let nvlink = SetRequest {
        preferences: TopologyPreferences::default().require(TopologyScope::NvLink),
        ..request(9, free)
    };
    assert_eq!(chooser.choose(&nvlink, &mut steps), Ok(None));
    assert_eq!(chooser.choose(&nvlink, &mut 10), Err(OutOfSteps));
}

#[test]
fn all_sets_are_listed_once_if_too_many_to_rank() {
    let mut machine = boxes(3);
    assert!(chooser(&machine).value().is_exact());
    // Different link counts at each device: no two are twins.
    for (a, row) in machine.pairs.iter_mut().enumerate() {
        for (b, pair) in row.iter_mut().enumerate() {
            pair.nvlinks += ((a * b) % 7) as u32 + (a + b) as u32;
        }
    }
    let ragged = SetChooser::new(machine.matrix(), &SizeMix::default());
    assert!(!ragged.value().is_exact());
    let asked = request(6, DeviceSet::first(24));
    let mut sets = ragged.sets(&asked);
    let (mut seen, mut steps) = (BTreeSet::new(), u64::MAX);
    while let Some(choice) = sets.next(&mut steps).unwrap() {
        assert!(seen.insert(choice.devices), "{choice:?} came twice");
    }
    assert_eq!(seen.len(), 134_596, "any 6 of 24");
}

fn machines(most: usize) -> impl Strategy<Value = Machine> {
    let level = prop::sample::select(PcieLevel::ALL.to_vec());
    let pairs = prop::collection::vec((0u32..4, level), most * most);
    let places =
        prop::collection::vec((prop::option::of(0u32..2), prop::option::of(0u32..3)), most);
    (1..=most, pairs, places).prop_map(|(count, pairs, places)| {
        let mut machine = Machine::of(count);
        let places = places
            .into_iter()
            .map(|(numa_node, pcie_root)| DeviceLocation { pcie_root, numa_node });
        machine.places = places.take(count).collect();
        let mut pairs = pairs.into_iter();
        for a in 0..count {
            for b in a + 1..count {
                let (nvlinks, pcie) = pairs.next().unwrap();
                machine =
                    machine.nvlinks(nvlinks.saturating_sub(1), &[(a, b)]).pcie(pcie, &[(a, b)]);
            }
        }
        machine
    })
}

fn preferences() -> impl Strategy<Value = TopologyPreferences> {
    let scope = || prop::option::of(prop::sample::select(TopologyScope::ALL.to_vec()));
    (scope(), scope()).prop_map(|(required, preferred)| {
        let preferences = required.map_or(TopologyPreferences::default(), |scope| {
            TopologyPreferences::default().require(scope)
        });
        preferred.map_or(preferences, |scope| preferences.prefer(scope))
    })
}

fn meets_requirements(
    matrix: &LinkMatrix,
    preferences: TopologyPreferences,
    set: DeviceSet,
) -> bool {
    let pairs = set.len() * set.len().saturating_sub(1) / 2;
    preferences.required().all(|scope| matrix.pairs_sharing(scope, set) == pairs)
}

proptest! {
    #[test]
    fn all_valid_sets_are_listed_once_best_first(
        machine in machines(7),
        candidates in 0u64..128,
        free in 0u64..128,
        count in 0usize..5,
        preferences in preferences(),
    ) {
        let matrix = machine.matrix();
        let all = matrix.devices();
        let (candidates, free) =
            (DeviceSet::from_bits(candidates) & all, DeviceSet::from_bits(free) & all);
        let asked = SetRequest { count, candidates, free, preferences };
        let chooser = chooser(&machine);
        let mut sets = chooser.sets(&asked);
        let mut found = Vec::new();
        while let Some(choice) = sets.next(&mut u64::MAX.clone()).unwrap() {
            prop_assert_eq!(choice.score, matrix.score(choice.devices));
            found.push(choice.devices);
        }
        let mut sorted = found.clone();
        sorted.sort();
        let mut expected = all_sets(candidates, count);
        expected.retain(|set| meets_requirements(&matrix, preferences, *set));
        prop_assert_eq!(sorted, expected.clone());
        prop_assert_eq!(
            choose(&chooser, &asked).map(|choice| choice.devices),
            found.first().copied()
        );

        // Preferred pairs first, then four fifths of the best score, then score plus residual
        // value.
        let counts = |scope: &TopologyScope| {
            *scope != TopologyScope::NvLink && preferences == preferences.prefer(*scope)
        };
        let preferred = |set: DeviceSet| -> usize {
            TopologyScope::ALL
                .iter()
                .filter(|s| counts(s))
                .map(|s| matrix.pairs_sharing(*s, set))
                .sum()
        };
        let most = expected.iter().map(|set| preferred(*set)).max().unwrap_or(0);
        let best = expected
            .iter()
            .filter(|set| preferred(**set) == most)
            .map(|set| matrix.score(*set))
            .max()
            .unwrap_or(0);
        let rank = |set: DeviceSet| {
            let meets_floor = preferred(set) == most && matrix.score(set) * 5 >= best * 4;
            let total = f64::from(matrix.score(set)) + chooser.value().points(&matrix, free - set);
            (preferred(set), meets_floor, total)
        };
        for pair in found.windows(2) {
            let ((p1, f1, t1), (p2, f2, t2)) = (rank(pair[0]), rank(pair[1]));
            prop_assert!(
                (p1, f1) >= (p2, f2) && ((p1, f1) > (p2, f2) || t1 >= t2 - 1.0),
                "{pair:?}"
            );
        }
    }

    #[test]
    fn choice_is_invariant_under_device_order(
        machine in machines(7),
        free in 0u64..128,
        count in 1usize..5,
        preferences in preferences(),
        shift in 0usize..7,
        reverse: bool,
    ) {
        let matrix = machine.matrix();
        let n = matrix.len();
        let mut order: Vec<usize> = (0..n).map(|at| (at + shift) % n).collect();
        if reverse {
            order.reverse();
        }
        let free = DeviceSet::from_bits(free) & matrix.devices();
        let moved: DeviceSet = (0..n).filter(|new| free.contains(order[*new])).collect();
        let other = machine.reordered(&order);
        let (here, there) = (chooser(&machine), chooser(&other));
        let one = choose(&here, &SetRequest { preferences, ..request(count, free) });
        let two = choose(&there, &SetRequest { preferences, ..request(count, moved) });
        let properties = |choice: SetChoice, chooser: &SetChooser, free: DeviceSet| {
            let left = chooser.value().points(chooser.matrix(), free - choice.devices);
            (choice.score, choice.weakest_pair, left)
        };
        prop_assert_eq!(
            one.map(|c| properties(c, &here, free)),
            two.map(|c| properties(c, &there, moved))
        );
    }

    #[test]
    fn residual_value_is_reached_and_beats_greedy(machine in machines(6)) {
        let matrix = machine.matrix();
        let chooser = chooser(&machine);
        let chosen = |free, count| choose(&chooser, &request(count, free)).unwrap().devices;
        let greedy = |free, count| {
            all_sets(free, count).into_iter().max_by_key(|set| matrix.score(*set)).unwrap()
        };
        let value = chooser.value().points(&matrix, matrix.devices());
        // Whole points are compared, so each request may lose a fraction of one.
        prop_assert!((expected(&matrix, matrix.devices(), &chosen) - value).abs() < 3.0);
        prop_assert!(value >= expected(&matrix, matrix.devices(), &greedy) - 0.01);
    }
}

/// Returns the expected sum of scores of requests for one to four devices.
///
/// It ends with the first request that does not fit.
fn expected(
    matrix: &LinkMatrix,
    free: DeviceSet,
    policy: &dyn Fn(DeviceSet, usize) -> DeviceSet,
) -> f64 {
    let one = |count: usize| {
        let set = policy(free, count);
        0.25 * (f64::from(matrix.score(set)) + expected(matrix, free - set, policy))
    };
    (1..=4.min(free.len())).map(one).sum()
}

//! Fraction of the requests that can use a GPU, by its free share and the free CPU of its node.

use std::collections::BTreeMap;

use super::request::{GpuFraction, GpuRequest, GpuType, NodeCapacity};

/// Classes of a mix, arranged to compute the fraction that cannot use a GPU.
///
/// Requests for one GPU depend on each GPU alone. They are summed up in one table per GPU type,
/// over the distinct CPU amounts and shares. Requests for several GPUs, usually few different ones,
/// are evaluated one by one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct UsabilityTable {
    /// Distinct CPU amounts of requests for one GPU, ascending.
    cpu: Vec<u64>,
    /// Distinct shares of these requests, or representatives of them, ascending.
    shares: Vec<u32>,
    /// Types that requests name, ascending. There is a table for each, and one for all other
    /// types.
    types: Vec<GpuType>,
    /// Fraction of requests that cannot use a GPU.
    ///
    /// Indexed by type, then by number of satisfied `cpu` amounts, then by number of satisfied
    /// `shares`.
    unusable: Vec<f64>,
    multi_gpu: Vec<(GpuRequest, f64)>,
}

/// Half the maximum number of distinct shares; tenants choose shares, so the tables must be
/// bounded.
const MAX_SHARES: usize = 32;

/// Maximum number of requests for several GPUs, which are evaluated one by one.
const MAX_MULTI_GPU: usize = 256;

/// Represents all types that no request names.
const NO_NAMED_TYPE: GpuType = GpuType(u16::MAX);

impl UsabilityTable {
    /// Creates the tables for requests for GPUs, each with its fraction.
    pub(super) fn new(parts: &[(GpuRequest, f64)]) -> Self {
        let single: Vec<(GpuRequest, f64)> =
            parts.iter().copied().filter(|(r, _)| r.gpus == 1).collect();
        let multi_gpu = heaviest(parts.iter().copied().filter(|(r, _)| r.gpus > 1).collect());
        let cpu = distinct(single.iter().map(|(request, _)| request.cpu_milli));
        let shares = representative_shares(&single);
        let is_named = |kind: &GpuType| {
            single.iter().any(|(r, _)| r.types.contains(*kind) != r.types.contains(NO_NAMED_TYPE))
        };
        let types: Vec<GpuType> = (0..127).map(GpuType).filter(is_named).collect();
        let mut usable = Self { cpu, shares, types, unusable: Vec::new(), multi_gpu };
        for kind in usable.types.clone().into_iter().chain([NO_NAMED_TYPE]) {
            let table = usable.table(&single, kind);
            usable.unusable.extend(table);
        }
        usable
    }

    /// Computes the table of one type: the total minus the sum of the classes that can use the GPU.
    fn table(&self, single: &[(GpuRequest, f64)], kind: GpuType) -> Vec<f64> {
        let (rows, columns) = (self.cpu.len() + 1, self.shares.len() + 1);
        let mut table = vec![0.0; rows * columns];
        for (request, part) in single.iter().filter(|(request, _)| request.types.contains(kind)) {
            let row = self.cpu.partition_point(|&cpu| cpu <= request.cpu_milli);
            // First share that satisfies it: itself, unless there are too many distinct shares.
            let column =
                self.shares.partition_point(|&share| share < request.share.thousandths()) + 1;
            table[row * columns + column] += part;
        }
        for row in 0..rows {
            for column in 1..columns {
                table[row * columns + column] += table[row * columns + column - 1];
            }
        }
        for at in columns..rows * columns {
            table[at] += table[at - columns];
        }
        let all: f64 = single.iter().map(|(_, part)| part).sum();
        table.into_iter().map(|useful| all - useful).collect()
    }

    /// Returns the fragmentation F of the FGD paper, in thousandths of a GPU.
    ///
    /// It is the expected free capacity of the node's GPUs that a request of the mix cannot use.
    pub(super) fn fragments(&self, node: &NodeCapacity<'_>) -> f64 {
        let (rows, columns) = (self.cpu.len() + 1, self.shares.len() + 1);
        let row = self.cpu.partition_point(|&cpu| cpu <= node.cpu_milli);
        let mut sum = 0.0;
        for gpu in node.gpus {
            let table = self.types.binary_search(&gpu.gpu_type).unwrap_or(self.types.len());
            let left = gpu.free.thousandths();
            let column = self.shares.partition_point(|&share| share <= left);
            sum += f64::from(left) * self.unusable[(table * rows + row) * columns + column];
        }
        sum + self
            .multi_gpu
            .iter()
            .map(|(request, part)| part * fragment(request, node))
            .sum::<f64>()
    }
}

/// Returns the capacity of the node's GPUs that one request for several GPUs cannot use.
fn fragment(request: &GpuRequest, node: &NodeCapacity<'_>) -> f64 {
    let (mut all, mut usable, mut number) = (0, 0, 0);
    for gpu in node.gpus {
        all += gpu.free.thousandths();
        if gpu.free >= request.share && request.types.contains(gpu.gpu_type) {
            usable += gpu.free.thousandths();
            number += 1;
        }
    }
    let fits = number >= request.gpus && node.cpu_milli >= request.cpu_milli;
    f64::from(if fits { all - usable } else { all })
}

/// Returns the distinct shares, ascending, if they are few.
///
/// Otherwise returns the most requested ones and the largest of each of [`MAX_SHARES`] ranges of
/// equal length. A share between two of these counts as the larger one.
fn representative_shares(single: &[(GpuRequest, f64)]) -> Vec<u32> {
    let mut asked: BTreeMap<u32, f64> = BTreeMap::new();
    for (request, part) in single {
        *asked.entry(request.share.thousandths()).or_default() += part;
    }
    if asked.len() <= 2 * MAX_SHARES {
        return asked.into_keys().collect();
    }
    let length = GpuFraction::WHOLE.thousandths().div_ceil(MAX_SHARES as u32);
    let largest: BTreeMap<u32, u32> =
        asked.keys().map(|share| (share.div_ceil(length), *share)).collect();
    let mut by_part: Vec<(u32, f64)> = asked.into_iter().collect();
    by_part.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let heaviest = by_part.into_iter().take(MAX_SHARES).map(|(share, _)| share);
    distinct(largest.into_values().chain(heaviest))
}

/// Returns the most frequent requests.
fn heaviest(mut requests: Vec<(GpuRequest, f64)>) -> Vec<(GpuRequest, f64)> {
    if requests.len() > MAX_MULTI_GPU {
        requests.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        requests.truncate(MAX_MULTI_GPU);
    }
    requests
}

fn distinct<T: Ord>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut values: Vec<T> = values.collect();
    values.sort_unstable();
    values.dedup();
    values
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fragmentation::{GpuFraction, GpuState, GpuTypes};

    fn request(cpu_milli: u64, gpus: u32, share: u32, types: GpuTypes) -> GpuRequest {
        GpuRequest { cpu_milli, gpus, share: GpuFraction::new(share), types }
    }

    fn gpu(kind: u16, left: u32) -> GpuState {
        GpuState { gpu_type: GpuType(kind), free: GpuFraction::new(left) }
    }

    #[test]
    fn fragmentation_equals_definition_of_the_paper() {
        // A quarter of the requests is for 500 of one GPU and 4 cores, a quarter for a whole one
        // and 8 cores, half for two whole ones and 8 cores.
        let any = GpuTypes::ANY;
        let usable = UsabilityTable::new(&[
            (request(4000, 1, 500, any), 0.25),
            (request(8000, 1, 1000, any), 0.25),
            (request(8000, 2, 1000, any), 0.5),
        ]);
        let gpus = [gpu(0, 1000), gpu(0, 600), gpu(0, 100)];
        // The first can use all but 100; the second all but 700; the third finds no two GPUs, so it
        // cannot use any of the 1700.
        let node = NodeCapacity { cpu_milli: 8000, gpus: &gpus };
        assert!(
            (usable.fragments(&node) - (0.25 * 100.0 + 0.25 * 700.0 + 0.5 * 1700.0)).abs() < 1e-9
        );
        // With less than 8 cores only the first can use a GPU.
        let node = NodeCapacity { cpu_milli: 7999, gpus: &gpus };
        assert!((usable.fragments(&node) - (0.25 * 100.0 + 0.75 * 1700.0)).abs() < 1e-9);
    }

    #[test]
    fn gpu_of_unaccepted_type_is_a_fragment() {
        let usable = UsabilityTable::new(&[
            (request(0, 1, 1000, GpuTypes::of([GpuType(1)])), 0.5),
            (request(0, 1, 1000, GpuTypes::ANY), 0.5),
        ]);
        let of = |kind| usable.fragments(&NodeCapacity { cpu_milli: 0, gpus: &[gpu(kind, 1000)] });
        assert!((of(1) - 0.0).abs() < 1e-9);
        assert!((of(0) - 500.0).abs() < 1e-9);
        assert!((of(2) - 500.0).abs() < 1e-9);
    }

    fn requests() -> impl Strategy<Value = Vec<(GpuRequest, f64)>> {
        let types =
            prop_oneof![Just(GpuTypes::ANY), (0_u16..3).prop_map(|t| GpuTypes::of([GpuType(t)]))];
        let one = (0_u64..20, 1_u32..4, 1_u32..=10, types)
            .prop_map(|(cpu, gpus, share, types)| request(cpu * 1000, gpus, share * 100, types));
        prop::collection::vec((one, 0.01_f64..1.0), 1..12)
    }

    /// Returns the largest error of the tables, as a fraction of the free share of a GPU.
    fn largest_error(parts: &[(GpuRequest, f64)]) -> f64 {
        let usable = UsabilityTable::new(parts);
        assert!(usable.shares.len() <= 2 * MAX_SHARES, "{} shares", usable.shares.len());
        let error = |left| {
            let gpus = [gpu(0, left)];
            let node = NodeCapacity { cpu_milli: 0, gpus: &gpus };
            let exact: f64 =
                parts.iter().map(|(request, part)| part * fragment(request, &node)).sum();
            (usable.fragments(&node) - exact).abs() / f64::from(left)
        };
        (1..=1000).map(error).fold(0.0, f64::max)
    }

    #[test]
    fn table_size_and_error_are_bounded_for_all_shares() {
        let alike: Vec<_> =
            (1..=1000).map(|share| (request(0, 1, share, GpuTypes::ANY), 0.001)).collect();
        let error = largest_error(&alike);
        assert!(error <= 0.033, "{error}");
        let mut halves = alike;
        halves.iter_mut().for_each(|(_, part)| *part /= 10.0);
        halves[499].1 = 0.9;
        let error = largest_error(&halves);
        assert!(error <= 0.0033, "{error}");
    }

    #[test]
    fn number_of_multi_gpu_requests_is_bounded() {
        let parts: Vec<_> =
            (1..=1000).map(|share| (request(0, 2, share, GpuTypes::ANY), 0.001)).collect();
        assert_eq!(UsabilityTable::new(&parts).multi_gpu.len(), MAX_MULTI_GPU);
    }

    proptest! {
        #[test]
        fn tables_equal_evaluation_of_each_request(
            parts in requests(),
            cpu in 0_u64..24,
            gpus in prop::collection::vec((0_u16..4, 0_u32..=10), 0..8),
        ) {
            let gpus: Vec<GpuState> =
                gpus.into_iter().map(|(kind, left)| gpu(kind, left * 100)).collect();
            let node = NodeCapacity { cpu_milli: cpu * 1000, gpus: &gpus };
            let expected: f64 =
                parts.iter().map(|(request, part)| part * fragment(request, &node)).sum();
            prop_assert!((UsabilityTable::new(&parts).fragments(&node) - expected).abs() < 1e-6);
        }
    }
}

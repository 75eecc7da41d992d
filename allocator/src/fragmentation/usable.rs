//! Which part of the requests can use a GPU, by what is left of it and of its node.

use std::collections::BTreeMap;

use super::request::{GpuMilli, GpuType, NodeView, Request};

/// The classes of a mix, laid out for the question "to which part of them is this a fragment?".
///
/// A request for one GPU looks at each GPU by itself, so those are summed up in advance in one
/// table per type of GPU, over the distinct amounts of CPU and the distinct shares that are asked
/// for. Requests for several GPUs, rarely many different ones, are looked at one by one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Usable {
    /// The distinct amounts of CPU that requests for one GPU ask for, ascending.
    cpu: Vec<u64>,
    /// Their distinct shares, or as many as do, ascending.
    shares: Vec<u32>,
    /// Types that some request names, ascending; a table for each, and then one for all other
    /// types.
    types: Vec<GpuType>,
    /// By type, then by how many of `cpu` are satisfied, then by how many of `shares`: the part of
    /// all requests to which such a GPU is useless.
    useless: Vec<f64>,
    several: Vec<(Request, f64)>,
}

/// Tenants choose shares, and tables grow with them: twice so many are told apart.
const MOST_SHARES: usize = 32;

/// Requests for several GPUs are looked at one by one: so many.
const MOST_SEVERAL: usize = 256;

/// A type that no request names stands for all such.
const NO_NAMED_TYPE: GpuType = GpuType(u16::MAX);

impl Usable {
    /// For requests for GPUs, each with the part that it is.
    pub(super) fn new(parts: &[(Request, f64)]) -> Self {
        let single: Vec<(Request, f64)> =
            parts.iter().copied().filter(|(r, _)| r.gpus == 1).collect();
        let several = heaviest(parts.iter().copied().filter(|(r, _)| r.gpus > 1).collect());
        let cpu = distinct(single.iter().map(|(request, _)| request.cpu_milli));
        let shares = few(&single);
        let is_named = |kind: &GpuType| {
            single.iter().any(|(r, _)| r.types.contains(*kind) != r.types.contains(NO_NAMED_TYPE))
        };
        let types: Vec<GpuType> = (0..127).map(GpuType).filter(is_named).collect();
        let mut usable = Self { cpu, shares, types, useless: Vec::new(), several };
        for kind in usable.types.clone().into_iter().chain([NO_NAMED_TYPE]) {
            let table = usable.table(&single, kind);
            usable.useless.extend(table);
        }
        usable
    }

    /// The table of one type: everything but the sum of what can use it.
    fn table(&self, single: &[(Request, f64)], kind: GpuType) -> Vec<f64> {
        let (rows, columns) = (self.cpu.len() + 1, self.shares.len() + 1);
        let mut table = vec![0.0; rows * columns];
        for (request, part) in single.iter().filter(|(request, _)| request.types.contains(kind)) {
            let row = self.cpu.partition_point(|&cpu| cpu <= request.cpu_milli);
            // The first that satisfies it: itself, unless there are too many.
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

    /// FGD's F: the thousandths of the node's GPUs that are a fragment to a request of the mix, on
    /// average.
    pub(super) fn fragments(&self, node: &NodeView<'_>) -> f64 {
        let (rows, columns) = (self.cpu.len() + 1, self.shares.len() + 1);
        let row = self.cpu.partition_point(|&cpu| cpu <= node.cpu_milli);
        let mut sum = 0.0;
        for gpu in node.gpus {
            let table = self.types.binary_search(&gpu.kind).unwrap_or(self.types.len());
            let left = gpu.left.thousandths();
            let column = self.shares.partition_point(|&share| share <= left);
            sum += f64::from(left) * self.useless[(table * rows + row) * columns + column];
        }
        sum + self.several.iter().map(|(request, part)| part * fragment(request, node)).sum::<f64>()
    }
}

/// What of the node's GPUs is a fragment to one request for several GPUs.
fn fragment(request: &Request, node: &NodeView<'_>) -> f64 {
    let (mut all, mut usable, mut number) = (0, 0, 0);
    for gpu in node.gpus {
        all += gpu.left.thousandths();
        if gpu.left >= request.share && request.types.contains(gpu.kind) {
            usable += gpu.left.thousandths();
            number += 1;
        }
    }
    let fits = number >= request.gpus && node.cpu_milli >= request.cpu_milli;
    f64::from(if fits { all - usable } else { all })
}

/// The distinct shares, ascending, if they are few. Otherwise those that are asked for most, and
/// the largest of each of so many ranges of equal length: a share between two of these counts as
/// the larger.
fn few(single: &[(Request, f64)]) -> Vec<u32> {
    let mut asked: BTreeMap<u32, f64> = BTreeMap::new();
    for (request, part) in single {
        *asked.entry(request.share.thousandths()).or_default() += part;
    }
    if asked.len() <= 2 * MOST_SHARES {
        return asked.into_keys().collect();
    }
    let length = GpuMilli::WHOLE.thousandths().div_ceil(MOST_SHARES as u32);
    let largest: BTreeMap<u32, u32> =
        asked.keys().map(|share| (share.div_ceil(length), *share)).collect();
    let mut by_part: Vec<(u32, f64)> = asked.into_iter().collect();
    by_part.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let heaviest = by_part.into_iter().take(MOST_SHARES).map(|(share, _)| share);
    distinct(largest.into_values().chain(heaviest))
}

/// Those that are asked for most.
fn heaviest(mut requests: Vec<(Request, f64)>) -> Vec<(Request, f64)> {
    if requests.len() > MOST_SEVERAL {
        requests.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        requests.truncate(MOST_SEVERAL);
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
    use crate::fragmentation::{Gpu, GpuMilli, GpuTypes};

    fn request(cpu_milli: u64, gpus: u32, share: u32, types: GpuTypes) -> Request {
        Request { cpu_milli, gpus, share: GpuMilli::new(share), types }
    }

    fn gpu(kind: u16, left: u32) -> Gpu {
        Gpu { kind: GpuType(kind), left: GpuMilli::new(left) }
    }

    #[test]
    fn fragments_are_what_the_paper_counts() {
        // A quarter wants 500 of one GPU and 4 cores, a quarter a whole one and 8 cores, a half two
        // whole ones and 8 cores.
        let any = GpuTypes::ANY;
        let usable = Usable::new(&[
            (request(4000, 1, 500, any), 0.25),
            (request(8000, 1, 1000, any), 0.25),
            (request(8000, 2, 1000, any), 0.5),
        ]);
        let gpus = [gpu(0, 1000), gpu(0, 600), gpu(0, 100)];
        // The first can use all but 100; the second all but 700; the third finds no two GPUs, so
        // all 1700 are lost to it.
        let node = NodeView { cpu_milli: 8000, gpus: &gpus };
        assert!(
            (usable.fragments(&node) - (0.25 * 100.0 + 0.25 * 700.0 + 0.5 * 1700.0)).abs() < 1e-9
        );
        // With less than 8 cores only the first can use anything.
        let node = NodeView { cpu_milli: 7999, gpus: &gpus };
        assert!((usable.fragments(&node) - (0.25 * 100.0 + 0.75 * 1700.0)).abs() < 1e-9);
    }

    #[test]
    fn a_gpu_of_another_type_is_a_fragment() {
        let usable = Usable::new(&[
            (request(0, 1, 1000, GpuTypes::of([GpuType(1)])), 0.5),
            (request(0, 1, 1000, GpuTypes::ANY), 0.5),
        ]);
        let of = |kind| usable.fragments(&NodeView { cpu_milli: 0, gpus: &[gpu(kind, 1000)] });
        assert!((of(1) - 0.0).abs() < 1e-9);
        assert!((of(0) - 500.0).abs() < 1e-9);
        assert!((of(2) - 500.0).abs() < 1e-9);
    }

    fn requests() -> impl Strategy<Value = Vec<(Request, f64)>> {
        let types =
            prop_oneof![Just(GpuTypes::ANY), (0_u16..3).prop_map(|t| GpuTypes::of([GpuType(t)]))];
        let one = (0_u64..20, 1_u32..4, 1_u32..=10, types)
            .prop_map(|(cpu, gpus, share, types)| request(cpu * 1000, gpus, share * 100, types));
        prop::collection::vec((one, 0.01_f64..1.0), 1..12)
    }

    /// The most by which what is told of a GPU differs, as a part of what is left of it.
    fn largest_error(parts: &[(Request, f64)]) -> f64 {
        let usable = Usable::new(parts);
        assert!(usable.shares.len() <= 2 * MOST_SHARES, "{} shares", usable.shares.len());
        let error = |left| {
            let gpus = [gpu(0, left)];
            let node = NodeView { cpu_milli: 0, gpus: &gpus };
            let exact: f64 =
                parts.iter().map(|(request, part)| part * fragment(request, &node)).sum();
            (usable.fragments(&node) - exact).abs() / f64::from(left)
        };
        (1..=1000).map(error).fold(0.0, f64::max)
    }

    #[test]
    fn tables_stay_small_whatever_shares_tenants_think_of_and_err_by_a_little_at_most() {
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
    fn requests_for_several_gpus_are_as_many_as_can_be_looked_at() {
        let parts: Vec<_> =
            (1..=1000).map(|share| (request(0, 2, share, GpuTypes::ANY), 0.001)).collect();
        assert_eq!(Usable::new(&parts).several.len(), MOST_SEVERAL);
    }

    proptest! {
        #[test]
        fn the_tables_say_what_looking_at_each_request_says(
            parts in requests(),
            cpu in 0_u64..24,
            gpus in prop::collection::vec((0_u16..4, 0_u32..=10), 0..8),
        ) {
            let gpus: Vec<Gpu> = gpus.into_iter().map(|(kind, left)| gpu(kind, left * 100)).collect();
            let node = NodeView { cpu_milli: cpu * 1000, gpus: &gpus };
            let expected: f64 = parts.iter().map(|(request, part)| part * fragment(request, &node)).sum();
            prop_assert!((Usable::new(&parts).fragments(&node) - expected).abs() < 1e-6);
        }
    }
}

//! Fragmentation potential: GPU capacity of a node that will probably stay unused.

use super::mix::RequestMix;
use super::prices::RemainderValue;
use super::request::{GpuRequest, NodeCapacity};
use super::usable::UsabilityTable;

/// Fragmentation potential of nodes for one mix of requests.
///
/// In thousandths of a GPU, with R_g the free share of GPU g and C the free CPU:
///
/// ```text
/// P = FRAGMENTS x F
///   + WASTE     x Σ_g (R_g - value(R_g))
///   + STRANDED  x max(0, ΣR_g - C / mean)
///   + LOST      x max(0, ΣR_g - C / least)
///
/// F      Σ over the mix of (observed + REFUSED x refused) x the part of ΣR_g that it cannot use
/// value  the prices of the shares that still fit
/// mean   CPU per GPU over the whole mix
/// least  CPU per GPU of the least demanding requests
/// ```
///
/// `observed` and `refused` are fractions of all requests. Classes with refusals keep GPUs usable
/// for them: several free ones on one node, or those of a rare type. Without refusals F equals that
/// of FGD.
#[derive(Debug, Clone, PartialEq)]
pub struct Potential {
    usable: UsabilityTable,
    remainder: RemainderValue,
    /// CPU milli per GPU milli; `None` if no request needs CPU.
    mean: Option<f64>,
    least: Option<f64>,
}

const FRAGMENTS: f64 = 0.4;
const WASTE: f64 = 2.0;
const STRANDED: f64 = 0.2;
const LOST: f64 = 0.4;

/// Additional weight of a refused request in F.
const REFUSED: f64 = 60.0;

/// Smallest difference that counts, in thousandths of a GPU. Below it nodes are equal and are
/// filled one after the other in tie-break order, which keeps the later ones free. FGD depends on
/// similar rounding.
const STEP: f64 = 4.0;

/// Fraction of the GPU demand with the lowest CPU per GPU.
const LEAST_PART: f64 = 0.25;

/// Rise of a node's potential by a placement, in steps; less is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PotentialRise(i64);

impl PotentialRise {
    /// Returns the number of steps.
    #[must_use]
    pub const fn steps(self) -> i64 {
        self.0
    }
}

impl Potential {
    /// Computes the potential for a mix of requests.
    #[must_use]
    pub fn new(mix: &RequestMix) -> Self {
        let parts = mix.parts();
        let shares = parts
            .iter()
            .map(|(r, part)| (r.share.thousandths() as usize, part * f64::from(r.gpus)));
        let density = Densities::of(&parts);
        Self {
            usable: UsabilityTable::new(&mix.weighted(REFUSED)),
            remainder: RemainderValue::of(&shares.collect::<Vec<_>>()),
            mean: density.mean(),
            least: density.quantile(LEAST_PART),
        }
    }

    /// Returns the potential of a node, in thousandths of a GPU.
    #[must_use]
    pub fn of(&self, node: &NodeCapacity<'_>) -> f64 {
        let left: u32 = node.gpus.iter().map(|gpu| gpu.free.thousandths()).sum();
        let value: f64 =
            node.gpus.iter().map(|gpu| self.remainder.at(gpu.free.thousandths())).sum();
        FRAGMENTS * self.usable.fragments(node)
            + WASTE * (f64::from(left) - value)
            + STRANDED * stranded(left, node.cpu_milli, self.mean)
            + LOST * stranded(left, node.cpu_milli, self.least)
    }

    /// Returns the rise from `before`, in the unit of [`Potential::of`], to the potential of
    /// `after`.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "a node has fewer than 2^50 GPUs")]
    pub fn rise(&self, before: f64, after: &NodeCapacity<'_>) -> PotentialRise {
        PotentialRise(((self.of(after) - before) / STEP).floor() as i64)
    }
}

/// Returns the free GPU capacity without CPU, at this CPU per GPU.
#[expect(clippy::cast_precision_loss, reason = "a node has less than 2^52 thousandths of a core")]
fn stranded(left: u32, cpu_milli: u64, density: Option<f64>) -> f64 {
    density.map_or(0.0, |density| (f64::from(left) - cpu_milli as f64 / density).max(0.0))
}

/// CPU per GPU of each class, ascending, with its fraction of the GPU demand.
struct Densities(Vec<(f64, f64)>);

impl Densities {
    #[expect(clippy::cast_precision_loss, reason = "less than 2^52 thousandths")]
    fn of(parts: &[(GpuRequest, f64)]) -> Self {
        let total: f64 =
            parts.iter().map(|(request, part)| part * request.total_milli() as f64).sum();
        let class = |(request, part): &(GpuRequest, f64)| {
            let milli = request.total_milli() as f64;
            (request.cpu_milli as f64 / milli, part * milli / total)
        };
        let mut classes: Vec<(f64, f64)> = parts.iter().map(class).collect();
        classes.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self(classes)
    }

    fn mean(&self) -> Option<f64> {
        Some(self.0.iter().map(|(density, part)| density * part).sum()).filter(|&mean| mean > 0.0)
    }

    /// Returns the CPU per GPU at this quantile of the demand.
    fn quantile(&self, part: f64) -> Option<f64> {
        let mut sum = 0.0;
        let reached = self.0.iter().find(|(_, of_class)| {
            sum += of_class;
            sum >= part
        });
        reached.map(|(density, _)| *density).filter(|&density| density > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fragmentation::{GpuFraction, GpuState, GpuType, GpuTypes};

    fn request(cpu_milli: u64, gpus: u32, share: u32) -> GpuRequest {
        GpuRequest { cpu_milli, gpus, share: GpuFraction::new(share), types: GpuTypes::ANY }
    }

    fn potential(requests: &[GpuRequest]) -> Potential {
        let mut mix = RequestMix::empty();
        requests.iter().for_each(|&request| mix.observe(request));
        Potential::new(&mix)
    }

    fn gpus(left: &[u32]) -> Vec<GpuState> {
        left.iter()
            .map(|&left| GpuState { gpu_type: GpuType(0), free: GpuFraction::new(left) })
            .collect()
    }

    fn of(potential: &Potential, cpu_milli: u64, left: &[u32]) -> f64 {
        potential.of(&NodeCapacity { cpu_milli, gpus: &gpus(left) })
    }

    #[test]
    fn potential_equals_manual_calculation() {
        // All requests are for half a GPU and 4 cores: 8 cores per GPU, both mean and least.
        let halves = potential(&[request(4000, 1, 500)]);
        let expect = |cpu, left: &[u32], value: f64| {
            let is = of(&halves, cpu, left);
            assert!((is - value).abs() < 1e-6, "{cpu} {left:?}: {is}, not {value}");
        };
        expect(8000, &[1000], 0.0);
        // No request can use 300, and no share fits into it; the CPU suffices.
        expect(8000, &[300], FRAGMENTS * 300.0 + WASTE * 300.0);
        // 4 cores suffice for half of it.
        expect(4000, &[1000], (STRANDED + LOST) * 500.0);
        // Without CPU no request can use it.
        expect(0, &[1000], FRAGMENTS * 1000.0 + (STRANDED + LOST) * 1000.0);
    }

    #[test]
    fn prefers_colocating_shares_over_breaking_whole_gpus() {
        let mix =
            potential(&[request(4000, 1, 650), request(4000, 1, 320), request(8000, 1, 1000)]);
        let before = of(&mix, 64_000, &[1000, 350, 700]);
        let rise =
            |left: &[u32]| mix.rise(before, &NodeCapacity { cpu_milli: 60_000, gpus: &gpus(left) });
        let (beside, off, whole) =
            (rise(&[1000, 30, 700]), rise(&[1000, 350, 380]), rise(&[680, 350, 700]));
        assert!(beside < off && beside < whole, "{beside:?} {off:?} {whole:?}");
    }

    #[test]
    fn request_for_any_type_avoids_type_that_others_require() {
        let picky = GpuRequest { types: GpuTypes::of([GpuType(7)]), ..request(8000, 1, 1000) };
        let mix = potential(&[picky, request(8000, 1, 1000), request(8000, 1, 1000)]);
        let rise = |kind| {
            let gpu = |left| [GpuState { gpu_type: GpuType(kind), free: GpuFraction::new(left) }];
            let before = mix.of(&NodeCapacity { cpu_milli: 8000, gpus: &gpu(1000) });
            mix.rise(before, &NodeCapacity { cpu_milli: 0, gpus: &gpu(0) })
        };
        assert!(rise(0) < rise(7));
    }

    #[test]
    fn refused_requests_raise_the_potential() {
        let (small, large) = (request(8000, 1, 1000), request(8000, 2, 1000));
        let mut mix = RequestMix::empty();
        [small, small, large].into_iter().for_each(|request| mix.observe(request));
        let alone = gpus(&[1000, 0]);
        let of = |mix: &RequestMix| {
            Potential::new(mix).of(&NodeCapacity { cpu_milli: 8000, gpus: &alone })
        };
        let before = of(&mix);
        mix.observe_refusal(large);
        // A third of the requests cannot use one free GPU.
        let more = FRAGMENTS * REFUSED * 1000.0 / 3.0;
        assert!((of(&mix) - before - more).abs() < 1e-3 * more, "{} after {before}", of(&mix));
    }

    #[test]
    fn empty_mix_gives_finite_potential() {
        let nothing = potential(&[]);
        assert!(of(&nothing, 0, &[1000, 300]).is_finite());
        assert!(of(&potential(&[request(4000, 0, 0)]), 0, &[1000]).is_finite());
        assert!(
            of(&potential(&[request(0, 1, 1000)]), 0, &[1000]).abs() < 1e-9,
            "no request needs CPU"
        );
    }

    proptest! {
        #[test]
        fn potential_falls_with_cpu_and_ignores_gpu_order(
            requests in prop::collection::vec((0_u64..40, 1_u32..4, 1_u32..=20), 1..12),
            mut left in prop::collection::vec(0_u32..=1000, 1..8),
            cpu in 0_u64..64_000,
        ) {
            let requests: Vec<GpuRequest> = requests
                .into_iter()
                .map(|(cpu, gpus, share)| request(cpu * 1000, gpus, share * 50))
                .collect();
            let potential = potential(&requests);
            let value = of(&potential, cpu, &left);
            prop_assert!(of(&potential, cpu + 1000, &left) <= value + 1e-6);
            left.reverse();
            prop_assert!((of(&potential, cpu, &left) - value).abs() < 1e-6);
        }
    }
}

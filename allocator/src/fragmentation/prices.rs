//! Value of the remainder of a GPU, by linear-programming prices.
//!
//! Cutting GPUs into requested shares is the cutting-stock problem. Its linear relaxation (Gilmore
//! and Gomory, 1961) has a dual price for each share size, such that no set of shares that fits on
//! a GPU costs more than one GPU. The price is the cost of a share of that size for the cluster. A
//! size that fits into gaps that a more frequent size leaves anyway is free; two sizes that fill a
//! GPU together divide its price between them. The value of a remainder is that of the most
//! expensive set of shares that fits; the rest is waste.

/// Maximum number of distinct sizes; the others count as the next larger one.
const MAX_SIZES: usize = 32;

/// Maximum number of pivots per size. If the linear program is not solved by then, the prices are
/// too high by a factor that [`RemainderValue`] scales away.
const MAX_PIVOTS_PER_SIZE: usize = 50;

/// Numerical tolerance.
const EPSILON: f64 = 1e-9;

const WHOLE: usize = 1000;

/// Value of the remainder of a GPU, in thousandths of a GPU, by its size in thousandths.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RemainderValue(Vec<f64>);

impl RemainderValue {
    /// Computes the values for shares of these sizes (thousandths, below 1000) and frequencies.
    pub(super) fn of(demand: &[(usize, f64)]) -> Self {
        let (sizes, counts) = grouped(demand);
        let mut stock = CuttingStock::new(&sizes, &counts);
        let mut best = stock.best_pattern();
        for _ in 0..MAX_PIVOTS_PER_SIZE * sizes.len() {
            if best.values[WHOLE] <= 1.0 + EPSILON || !stock.enter(&best.pattern(&sizes)) {
                break;
            }
            best = stock.best_pattern();
        }
        let gpu_price = best.values[WHOLE].max(1.0);
        let mut value: Vec<f64> =
            best.values.iter().map(|value| 1000.0 * value / gpu_price).collect();
        // A request for a whole GPU costs one GPU.
        value[WHOLE] = 1000.0;
        Self(value)
    }

    /// Returns the value of a remainder.
    pub(super) fn at(&self, thousandths: u32) -> f64 {
        self.0[(thousandths as usize).min(WHOLE)]
    }
}

/// Returns the sizes with most of the demand, ascending, with their frequencies. Other sizes count
/// as the next larger one.
fn grouped(demand: &[(usize, f64)]) -> (Vec<usize>, Vec<f64>) {
    let mut by_demand: Vec<(usize, f64)> = demand
        .iter()
        .copied()
        .filter(|&(size, count)| size > 0 && size < WHOLE && count > 0.0)
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "at most 1000")]
    let weight = |&(size, count): &(usize, f64)| size as f64 * count;
    by_demand.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(b.0.cmp(&a.0)));
    let mut sizes: Vec<usize> = by_demand.iter().take(MAX_SIZES).map(|&(size, _)| size).collect();
    sizes.sort_unstable();
    let mut counts = vec![0.0; sizes.len()];
    for (size, count) in by_demand {
        let at = sizes.partition_point(|&known| known < size);
        if let Some(sum) = counts.get_mut(at) {
            *sum += count;
        }
    }
    (sizes, counts)
}

/// Linear program for the minimum number of GPUs that serve the demand, by column generation.
struct CuttingStock<'a> {
    sizes: &'a [usize],
    /// Inverse of the basis: a row for each pattern in use, a column for each size.
    inverse: Vec<Vec<f64>>,
    /// Number of GPUs cut by each pattern.
    cut: Vec<f64>,
}

/// Best pattern for each length.
struct BestPattern {
    values: Vec<f64>,
    /// Size that is cut off first, if any.
    first: Vec<Option<usize>>,
}

impl<'a> CuttingStock<'a> {
    /// Starts with one pattern per size: as many of it as fit.
    fn new(sizes: &'a [usize], counts: &[f64]) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "at most 1000")]
        let fit: Vec<f64> = sizes.iter().map(|&size| (WHOLE / size) as f64).collect();
        let row =
            |i: usize| (0..sizes.len()).map(|j| if i == j { 1.0 / fit[i] } else { 0.0 }).collect();
        let inverse = (0..sizes.len()).map(row).collect();
        Self {
            sizes,
            inverse,
            cut: counts.iter().zip(&fit).map(|(count, fit)| count / fit).collect(),
        }
    }

    /// Returns the dual price of each size, in GPUs.
    fn prices(&self) -> Vec<f64> {
        (0..self.sizes.len()).map(|size| self.inverse.iter().map(|row| row[size]).sum()).collect()
    }

    fn best_pattern(&self) -> BestPattern {
        let prices = self.prices();
        let mut best = BestPattern { values: vec![0.0; WHOLE + 1], first: vec![None; WHOLE + 1] };
        for length in 1..=WHOLE {
            let (mut value, mut first) = (best.values[length - 1], None);
            for (i, (&size, price)) in self.sizes.iter().zip(&prices).enumerate() {
                if size <= length && best.values[length - size] + price > value + EPSILON {
                    (value, first) = (best.values[length - size] + price, Some(i));
                }
            }
            best.values[length] = value;
            best.first[length] = first;
        }
        best
    }

    /// Adds a pattern to the basis in place of the one chosen by the ratio test. Returns false if
    /// there is none.
    fn enter(&mut self, pattern: &[f64]) -> bool {
        let dot = |row: &Vec<f64>| row.iter().zip(pattern).map(|(a, b)| a * b).sum();
        let direction: Vec<f64> = self.inverse.iter().map(dot).collect();
        let ratios = (0..direction.len()).filter(|&i| direction[i] > EPSILON);
        let Some(leaving) = ratios
            .min_by(|&a, &b| (self.cut[a] / direction[a]).total_cmp(&(self.cut[b] / direction[b])))
        else {
            return false;
        };
        let amount = self.cut[leaving] / direction[leaving];
        let pivot: Vec<f64> =
            self.inverse[leaving].iter().map(|x| x / direction[leaving]).collect();
        for (i, step) in direction.into_iter().enumerate() {
            self.cut[i] -= amount * step;
            self.inverse[i].iter_mut().zip(&pivot).for_each(|(x, p)| *x -= step * p);
        }
        self.cut[leaving] = amount;
        self.inverse[leaving] = pivot;
        true
    }
}

impl BestPattern {
    /// Returns the number of shares of each size in the best pattern of a GPU.
    fn pattern(&self, sizes: &[usize]) -> Vec<f64> {
        let mut pattern = vec![0.0; sizes.len()];
        let mut length = WHOLE;
        while length > 0 {
            match self.first[length] {
                Some(size) => {
                    pattern[size] += 1.0;
                    length -= sizes[size];
                }
                None => length -= 1,
            }
        }
        pattern
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn assert_values(values: &RemainderValue, expected: &[(u32, f64)]) {
        for &(left, value) in expected {
            assert!(
                (values.at(left) - value).abs() < 1e-6,
                "{left} has the value {}, not {value}",
                values.at(left)
            );
        }
    }

    #[test]
    fn size_that_fits_twice_costs_half_a_gpu() {
        // 470 + 470: the remainder beside one share has the value of half a GPU; 60 beside two are
        // waste.
        assert_values(
            &RemainderValue::of(&[(470, 10.0)]),
            &[(469, 0.0), (470, 500.0), (530, 500.0), (60, 0.0), (1000, 1000.0)],
        );
    }

    #[test]
    fn size_that_fills_gaps_of_frequent_size_is_free() {
        // Each 810 leaves a gap for a 160, and there are fewer of those: they need no further GPU.
        assert_values(
            &RemainderValue::of(&[(810, 10.0), (160, 2.0)]),
            &[(190, 0.0), (160, 0.0), (810, 1000.0)],
        );
    }

    #[test]
    fn size_more_frequent_than_gaps_has_its_own_price() {
        // Six 160 fit on a GPU; most of them find no gap beside an 810, so a gap for one is worth a
        // sixth.
        let sixth = 1000.0 / 6.0;
        assert_values(
            &RemainderValue::of(&[(810, 2.0), (160, 10.0)]),
            &[(160, sixth), (190, sixth), (810, 1000.0 - sixth)],
        );
    }

    #[test]
    fn only_whole_gpus_have_value_without_shares() {
        assert_values(&RemainderValue::of(&[]), &[(0, 0.0), (999, 0.0), (1000, 1000.0)]);
    }

    proptest! {
        #[test]
        fn value_is_monotonic_and_parts_do_not_exceed_a_gpu(
            demand in prop::collection::btree_map(1_usize..1000, 0.1_f64..100.0, 0..40),
        ) {
            let value = RemainderValue::of(&demand.into_iter().collect::<Vec<_>>());
            for left in 1..=1000_u32 {
                prop_assert!(value.at(left) >= value.at(left - 1) - 1e-6);
                prop_assert!(value.at(left) + value.at(1000 - left) <= 1000.0 + 1e-6, "at {left}");
            }
        }

        /// Weak duality: at these prices the demand costs at most the GPUs that it needs.
        ///
        /// That is at most the sum over the sizes served separately.
        #[test]
        fn demand_costs_at_most_the_sum_of_separate_sizes(
            demand in prop::collection::btree_map(20_usize..1000, 1_u32..50, 1..20),
        ) {
            let demand: Vec<(usize, f64)> =
                demand.into_iter().map(|(s, n)| (s, f64::from(n))).collect();
            let value = RemainderValue::of(&demand);
            let cost: f64 =
                demand.iter().map(|&(size, count)| count * value.at(size as u32) / 1000.0).sum();
            let alone: f64 = demand.iter().map(|&(size, count)| count / (1000 / size) as f64).sum();
            let volume: f64 =
                demand.iter().map(|&(size, count)| count * size as f64 / 1000.0).sum();
            prop_assert!(cost <= alone + 1e-6, "{cost} > {alone}");
            prop_assert!(
                cost >= volume - 1e-6,
                "{cost} < {volume}: the relaxation is bounded by the volume"
            );
        }
    }
}

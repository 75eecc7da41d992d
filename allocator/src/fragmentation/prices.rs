//! What is left of one GPU, valued by what it can still earn.
//!
//! Cutting GPUs into the shares that are asked for is the cutting-stock problem. Its linear
//! relaxation (Gilmore and Gomory, 1961) has a price for each size of share, such that no set of
//! shares that fits on a GPU costs more than one GPU: the price is what a share of that size costs
//! the cluster. A size that fills the gaps which a commoner size leaves anyway is free;
//! two sizes that pair off share the price of a GPU between them. What is left of a GPU is worth
//! the most expensive set of shares that fits into it, and the rest is waste.

/// Sizes are told apart up to so many; the others count as the next larger one.
const MOST_SIZES: usize = 32;

/// Pivots after which the prices are taken as they are: they are then too high by what [`Worth`]
/// scales away.
const MOST_PIVOTS_PER_SIZE: usize = 50;

/// Below this a number is rounding.
const EPSILON: f64 = 1e-9;

const WHOLE: usize = 1000;

/// What is left of a GPU is worth so much, in thousandths of a GPU, by the thousandths that are
/// left.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Worth(Vec<f64>);

impl Worth {
    /// For shares of these sizes (thousandths, below 1000), each asked for so often.
    pub(super) fn of(demand: &[(usize, f64)]) -> Self {
        let (sizes, counts) = grouped(demand);
        let mut stock = CuttingStock::new(&sizes, &counts);
        let mut best = stock.best_pattern();
        for _ in 0..MOST_PIVOTS_PER_SIZE * sizes.len() {
            if best.values[WHOLE] <= 1.0 + EPSILON || !stock.enter(&best.pattern(&sizes)) {
                break;
            }
            best = stock.best_pattern();
        }
        let price_of_a_gpu = best.values[WHOLE].max(1.0);
        let mut worth: Vec<f64> =
            best.values.iter().map(|value| 1000.0 * value / price_of_a_gpu).collect();
        // Whoever wants a whole GPU pays for one.
        worth[WHOLE] = 1000.0;
        Self(worth)
    }

    /// The worth of what is left.
    pub(super) fn at(&self, thousandths: u32) -> f64 {
        self.0[(thousandths as usize).min(WHOLE)]
    }
}

/// The sizes that make up most of the demand, ascending, with their counts; each other one counts
/// with the next larger.
fn grouped(demand: &[(usize, f64)]) -> (Vec<usize>, Vec<f64>) {
    let mut by_demand: Vec<(usize, f64)> = demand
        .iter()
        .copied()
        .filter(|&(size, count)| size > 0 && size < WHOLE && count > 0.0)
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "at most 1000")]
    let weight = |&(size, count): &(usize, f64)| size as f64 * count;
    by_demand.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(b.0.cmp(&a.0)));
    let mut sizes: Vec<usize> = by_demand.iter().take(MOST_SIZES).map(|&(size, _)| size).collect();
    sizes.sort_unstable();
    let mut counts = vec![0.0; sizes.len()];
    for (size, count) in by_demand {
        let at = sizes.partition_point(|&kept| kept < size);
        if let Some(sum) = counts.get_mut(at) {
            *sum += count;
        }
    }
    (sizes, counts)
}

/// The linear program "cut as few GPUs as serve the demand", solved by generating columns.
struct CuttingStock<'a> {
    sizes: &'a [usize],
    /// The inverse of the basis: a row for each pattern in use, a column for each size.
    inverse: Vec<Vec<f64>>,
    /// How many GPUs are cut by each of the patterns.
    cut: Vec<f64>,
}

/// The best that fits into each length.
struct BestPattern {
    values: Vec<f64>,
    /// Which size is cut off first, if any.
    first: Vec<Option<usize>>,
}

impl<'a> CuttingStock<'a> {
    /// Begins with one pattern for each size: as many of it as fit.
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

    /// The price of each size, in GPUs.
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

    /// Takes a pattern into the basis, for the one that it replaces soonest. `false` = it replaces
    /// none.
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
    /// How many of each size the best that fits on a GPU has.
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

    fn assert_worth(worth: &Worth, expected: &[(u32, f64)]) {
        for &(left, value) in expected {
            assert!(
                (worth.at(left) - value).abs() < 1e-6,
                "{left} is worth {}, not {value}",
                worth.at(left)
            );
        }
    }

    #[test]
    fn a_size_of_which_two_fit_costs_half_a_gpu() {
        // 470 + 470: what is left beside one is worth half a GPU, and 60 beside two are waste.
        assert_worth(
            &Worth::of(&[(470, 10.0)]),
            &[(469, 0.0), (470, 500.0), (530, 500.0), (60, 0.0), (1000, 1000.0)],
        );
    }

    #[test]
    fn a_size_that_fills_the_gaps_of_a_commoner_one_is_free() {
        // Each 810 leaves a gap that a 160 fits into, and there are fewer of those: nobody needs
        // another GPU for them.
        assert_worth(
            &Worth::of(&[(810, 10.0), (160, 2.0)]),
            &[(190, 0.0), (160, 0.0), (810, 1000.0)],
        );
    }

    #[test]
    fn a_size_that_is_commoner_than_the_gaps_costs_what_it_needs_by_itself() {
        // Six 160 fit on a GPU; most of them find no gap beside an 810, so a gap for one is worth a
        // sixth.
        let sixth = 1000.0 / 6.0;
        assert_worth(
            &Worth::of(&[(810, 2.0), (160, 10.0)]),
            &[(160, sixth), (190, sixth), (810, 1000.0 - sixth)],
        );
    }

    #[test]
    fn without_shares_only_a_whole_gpu_is_worth_anything() {
        assert_worth(&Worth::of(&[]), &[(0, 0.0), (999, 0.0), (1000, 1000.0)]);
    }

    proptest! {
        #[test]
        fn more_is_never_worth_less_and_parts_never_more_than_a_gpu(
            demand in prop::collection::btree_map(1_usize..1000, 0.1_f64..100.0, 0..40)
        ) {
            let worth = Worth::of(&demand.into_iter().collect::<Vec<_>>());
            for left in 1..=1000_u32 {
                prop_assert!(worth.at(left) >= worth.at(left - 1) - 1e-6);
                prop_assert!(worth.at(left) + worth.at(1000 - left) <= 1000.0 + 1e-6, "at {left}");
            }
        }

        /// Weak duality: at these prices the whole demand costs no more GPUs than it needs, which is at most what
        /// serving each size by itself needs.
        #[test]
        fn the_demand_costs_no_more_than_serving_each_size_by_itself(
            demand in prop::collection::btree_map(20_usize..1000, 1_u32..50, 1..20)
        ) {
            let demand: Vec<(usize, f64)> = demand.into_iter().map(|(s, n)| (s, f64::from(n))).collect();
            let worth = Worth::of(&demand);
            let cost: f64 = demand.iter().map(|&(size, count)| count * worth.at(size as u32) / 1000.0).sum();
            let alone: f64 = demand.iter().map(|&(size, count)| count / (1000 / size) as f64).sum();
            let volume: f64 = demand.iter().map(|&(size, count)| count * size as f64 / 1000.0).sum();
            prop_assert!(cost <= alone + 1e-6, "{cost} > {alone}");
            prop_assert!(cost >= volume - 1e-6, "{cost} < {volume}: the relaxation is bounded by the volume");
        }
    }
}

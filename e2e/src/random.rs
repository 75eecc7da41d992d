//! Random choices that a seed repeats: SplitMix64 (Steele, Lea, Flood 2014). Good enough to draw
//! lots, and nothing else.

/// A sequence of random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A seed that nobody has chosen: the nanoseconds of now.
    pub fn fresh_seed() -> u64 {
        let since =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        // Short enough to type.
        u64::from(since.subsec_nanos()) ^ (since.as_secs() & 0xffff)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// Yes, in so many of a hundred cases.
    pub fn percent(&mut self, chance: u64) -> bool {
        self.between(0, 99) < chance
    }

    /// One of these, of which there must be some.
    pub fn one_of<'a, T>(&mut self, things: &'a [T]) -> &'a T {
        let last = u64::try_from(things.len()).unwrap_or(u64::MAX) - 1;
        &things[usize::try_from(self.between(0, last)).unwrap_or(0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_sequence_and_another_does_not() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            [0; 8].map(|_| random.between(0, 999))
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn numbers_stay_between_their_bounds_and_reach_both() {
        let mut random = Random::new(1);
        let drawn: std::collections::BTreeSet<u64> =
            (0..200).map(|_| random.between(3, 6)).collect();
        assert_eq!(drawn, [3, 4, 5, 6].into());
    }
}

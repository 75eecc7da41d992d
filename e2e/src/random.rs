//! Pseudorandom numbers reproducible from a seed: SplitMix64 (Steele, Lea, Flood 2014). Not
//! cryptographically secure.

/// A generator of pseudorandom numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a new seed from the current time.
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

    /// Returns a number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// Returns true with the given probability, in percent.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.between(0, 99) < percent
    }

    /// Returns one element of a non-empty slice.
    pub fn one_of<'a, T>(&mut self, elements: &'a [T]) -> &'a T {
        let last = u64::try_from(elements.len()).unwrap_or(u64::MAX) - 1;
        &elements[usize::try_from(self.between(0, last)).unwrap_or(0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_sequences() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            [0; 8].map(|_| random.between(0, 999))
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn numbers_cover_inclusive_bounds() {
        let mut random = Random::new(1);
        let drawn: std::collections::BTreeSet<u64> =
            (0..200).map(|_| random.between(3, 6)).collect();
        assert_eq!(drawn, [3, 4, 5, 6].into());
    }
}

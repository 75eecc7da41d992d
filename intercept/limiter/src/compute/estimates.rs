//! How long kernels take, by what was seen.

use core::sync::atomic::{AtomicU64, Ordering};

/// What is launched: a kernel with its grid and blocks, or a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// A kernel, by its function, its grid and its blocks.
    ///
    /// A sum of products, all taken at once, since every launch waits for it (multilinear hashing,
    /// as Lemire and Kaser 2014; but with fixed numbers, so that what is promised of random
    /// ones is not promised here). The numbers are of SHA-512's initial state: odd, and with
    /// nothing in common in either half, which would have kernels crowd together.
    #[must_use]
    #[inline]
    pub const fn kernel(function: usize, grid: [u32; 3], block: [u32; 3]) -> Self {
        let sum = (function as u64)
            .wrapping_mul(0xbb67_ae85_84ca_a73b)
            .wrapping_add(pair(grid[0], grid[1]).wrapping_mul(0xa54f_f53a_5f1d_36f1))
            .wrapping_add(pair(block[0], grid[2]).wrapping_mul(0x510e_527f_ade6_82d1))
            .wrapping_add(pair(block[1], block[2]).wrapping_mul(0x9b05_688c_2b3e_6c1f));
        Self(sum | 1)
    }

    /// An executable graph: one unit.
    #[must_use]
    pub const fn graph(exec: usize) -> Self {
        Self(mix(exec as u64 ^ 0x6772_6170_6800_0000) | 1)
    }
}

const fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

/// Spreads addresses over all bits (the finaliser of `SplitMix64`).
const fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// A language model has thousands of shapes: 3,000 in turn leave few sets full.
const SETS: usize = 2048;
const WAYS: usize = 4;
/// Samples after which a mean forgets.
const MEMORY: u64 = 7;
/// Samples after which a mean is what is usual.
const USUAL: u64 = 3;
/// What a kernel is taken to cost before any kernel was measured.
const FIRST_NS: u64 = 100_000;
/// What a kernel is taken to cost at least.
const LEAST_NS: u64 = 1_000;
/// What a kernel never seen is taken to cost at most: it is measured at once, and settled.
const STRANGER_NS: u64 = 2_000_000;

#[derive(Debug, Default)]
struct Entry {
    /// 0: none.
    key: Word,
    mean_ns: Word,
    /// Samples that the mean stands for, up to [`MEMORY`].
    samples: Word,
    /// Mean of what it had by equal turns.
    even_ns: Word,
}

/// Averages of the last samples, by key: 256 KiB, all zeroes when new, of which those pages are
/// used that have kernels.
///
/// Written by one at a time, under the meter's lock, and read by anyone at any time: who reads
/// while an entry changes hands may take one kernel's mean for another's, once.
#[derive(Debug)]
pub struct Estimates {
    sets: [[Entry; WAYS]; SETS],
    /// Average of the first samples of keys; 0: none yet.
    stranger_ns: Word,
}

/// A number that others may read meanwhile.
#[derive(Debug, Default)]
struct Word(AtomicU64);

impl Word {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline]
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

impl Entry {
    const fn empty() -> Self {
        Self { key: Word::new(), mean_ns: Word::new(), samples: Word::new(), even_ns: Word::new() }
    }

    fn put(&self, key: u64, mean_ns: u64, samples: u64, even_ns: u64) {
        self.key.set(0);
        self.mean_ns.set(mean_ns);
        self.samples.set(samples);
        self.even_ns.set(even_ns);
        self.key.set(key);
    }
}

impl Default for Estimates {
    fn default() -> Self {
        Self::new()
    }
}

impl Estimates {
    /// Knows nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self { sets: [const { [const { Entry::empty() }; WAYS] }; SETS], stranger_ns: Word::new() }
    }

    /// GPU-ns that it takes, where it was measured.
    #[must_use]
    #[inline]
    pub fn known(&self, key: Key) -> Option<u64> {
        self.find(key).map(|entry| entry.mean_ns.get())
    }

    /// GPU-ns for what was never measured: as others were when they were new, but no more than 2
    /// ms.
    #[must_use]
    pub fn stranger(&self) -> u64 {
        match self.stranger_ns.get() {
            0 => FIRST_NS,
            STRANGER_NS.. => STRANGER_NS,
            ns => ns,
        }
    }

    /// Learns from a sample. No kernel takes no time: events are
    /// coarser than the shortest ones, and what costs nothing would never be measured again.
    pub fn learn(&self, key: Key, gpu_ns: u64) {
        let gpu_ns = gpu_ns.max(LEAST_NS);
        if let Some(entry) = self.find(key) {
            entry.mean_ns.set(blend(entry.mean_ns.get(), gpu_ns, entry.samples.get()));
            entry.samples.set((entry.samples.get() + 1).min(MEMORY));
            return;
        }
        if let Some(entry) = self.make_room(key) {
            entry.put(key.0, gpu_ns, 1, 0);
        }
        let stranger_ns = match self.stranger_ns.get() {
            0 => gpu_ns,
            before => blend(before, gpu_ns, MEMORY),
        };
        self.stranger_ns.set(stranger_ns);
    }

    /// Learns that a kernel took no less than `least_ns` and no more than `most_ns`.
    pub fn bound(&self, key: Key, least_ns: u64, most_ns: u64) {
        match self.known(key) {
            Some(mean_ns) if (least_ns..=most_ns).contains(&mean_ns) => {}
            Some(mean_ns) => self.learn(key, mean_ns.clamp(least_ns, most_ns.max(least_ns))),
            None => self.learn(key, least_ns.midpoint(most_ns)),
        }
    }

    /// GPU-ns that it usually takes, where that was measured several times.
    #[must_use]
    pub fn usual(&self, key: Key) -> Option<u64> {
        self.find(key).filter(|entry| entry.samples.get() >= USUAL).map(|entry| entry.mean_ns.get())
    }

    /// Learns that a kernel may take longer than before: often told, it is believed.
    pub fn raise(&self, key: Key) {
        if let Some(entry) = self.find(key) {
            entry.mean_ns.set(entry.mean_ns.get().saturating_add(entry.mean_ns.get() / 64));
        }
    }

    /// A free place, or that of the least known of a full set, of which all others age.
    fn make_room(&self, key: Key) -> Option<&Entry> {
        let set = self.set(key);
        if let Some(free) = set.iter().find(|entry| entry.key.get() == 0) {
            return Some(free);
        }
        for entry in set {
            entry.samples.set(entry.samples.get() / 2);
        }
        set.iter().min_by_key(|entry| entry.samples.get())
    }

    /// Learns what a kernel had by equal turns, and answers the mean of it.
    pub fn learn_even(&self, key: Key, gpu_ns: u64) -> u64 {
        let Some(entry) = self.find(key) else { return gpu_ns };
        let even_ns = match entry.even_ns.get() {
            0 => gpu_ns,
            before => blend(before, gpu_ns, MEMORY),
        };
        entry.even_ns.set(even_ns);
        even_ns
    }

    /// Forgets, since the address may be another's from now on.
    pub fn forget(&self, key: Key) {
        if let Some(entry) = self.find(key) {
            entry.put(0, 0, 0, 0);
        }
    }

    /// Believes the next sample of each kernel alone: any of them may be gone.
    pub fn doubt(&self) {
        for entry in self.sets.iter().flatten() {
            entry.samples.set(0);
        }
    }

    #[inline]
    fn find(&self, key: Key) -> Option<&Entry> {
        self.set(key).iter().find(|entry| entry.key.get() == key.0)
    }

    /// By the high bits, which all that a kernel is known by reaches.
    #[inline]
    fn set(&self, key: Key) -> &[Entry; WAYS] {
        &self.sets[(key.0 >> (u64::BITS - SETS.ilog2())) as usize]
    }
}

/// The mean of a new sample and of a mean that stands for so many.
const fn blend(mean: u64, sample: u64, samples: u64) -> u64 {
    if sample >= mean {
        mean + (sample - mean) / (1 + samples)
    } else {
        mean - (mean - sample) / (1 + samples)
    }
}

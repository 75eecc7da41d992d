//! Estimated GPU time of kernels, learnt from samples.

use core::sync::atomic::{AtomicU64, Ordering};

/// Key of a launch: a kernel with its grid and blocks, or a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// Returns the key of a kernel from its function, its grid and its blocks.
    ///
    /// A sum of products that the CPU computes in parallel, because every launch waits for it
    /// (multilinear hashing, as Lemire and Kaser 2014, but with fixed numbers: their proof for
    /// random ones does not hold here). The numbers are of SHA-512's initial state: odd, and
    /// unrelated in both halves, so that keys spread over all sets.
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

    /// Returns the key of an executable graph, which is measured as one unit.
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

/// A language model has thousands of shapes: 3,000 of them fill few sets.
const SETS: usize = 2048;
const WAYS: usize = 4;
/// Samples after which the mean decays.
const MEMORY: u64 = 7;
const SAMPLES_BITS: u32 = MEMORY.trailing_ones();
/// The time of a kernel beyond this multiple of its usual time is its excess.
const MOST_USUAL: u64 = 2;
/// The least excess in ns.
const LEAST_EXCESS_NS: u64 = 200_000;
/// Samples after which the mean is taken as typical.
const TYPICAL: u64 = 3;
/// Cost of a kernel before any kernel was measured.
const FIRST_NS: u64 = 100_000;
/// The least cost of a kernel.
const LEAST_NS: u64 = 1_000;
/// The most that an unmeasured kernel costs: it is measured at once, and corrected.
const MOST_UNMEASURED_NS: u64 = 2_000_000;

#[derive(Debug, Default)]
struct Entry {
    /// 0: free.
    key: Word,
    mean_ns: Word,
    /// Samples in the mean, up to [`MEMORY`], in the lowest three bits; the usual time above them.
    /// Launches read entries, which fill half of a cache line.
    usual: Word,
    /// Mean of its GPU time if all contexts have equal turns.
    even_ns: Word,
}

/// Averages of the last samples by key: 256 KiB, all zeroes when new. Only pages with kernels are
/// touched.
///
/// One thread writes at a time, under the meter's lock; others read at any time. A thread that
/// reads while an entry is replaced may take one kernel's mean for another's, once.
#[derive(Debug)]
pub struct Estimates {
    sets: [[Entry; WAYS]; SETS],
    /// Average of the first samples of all keys; 0: none yet.
    unmeasured_ns: Word,
}

/// A number that other threads may read meanwhile.
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
        Self { key: Word::new(), mean_ns: Word::new(), usual: Word::new(), even_ns: Word::new() }
    }

    fn samples(&self) -> u64 {
        self.usual.get() & MEMORY
    }

    fn usual_ns(&self) -> u64 {
        self.usual.get() >> SAMPLES_BITS
    }

    fn set_usual(&self, usual_ns: u64, samples: u64) {
        self.usual.set(usual_ns << SAMPLES_BITS | samples.min(MEMORY));
    }

    /// Updates the usual time. A sample beyond it raises it slowly, so that it stays at the time of
    /// a kernel that spins now and then, and follows a kernel that has become longer.
    fn learn(&self, gpu_ns: u64) {
        let (usual_ns, samples) = (self.usual_ns(), self.samples());
        let usual_ns = if samples > 0 && gpu_ns >= least_with_excess(usual_ns) {
            usual_ns + usual_ns / 64
        } else {
            blend(usual_ns, gpu_ns, samples)
        };
        self.mean_ns.set(blend(self.mean_ns.get(), gpu_ns, samples));
        self.set_usual(usual_ns, samples + 1);
    }

    fn put(&self, key: u64, mean_ns: u64, samples: u64, even_ns: u64) {
        self.key.set(0);
        self.mean_ns.set(mean_ns);
        self.set_usual(mean_ns, samples);
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
    /// Creates a table without kernels.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            sets: [const { [const { Entry::empty() }; WAYS] }; SETS],
            unmeasured_ns: Word::new(),
        }
    }

    /// Returns the GPU-ns of a kernel; `None` if it was not measured.
    #[must_use]
    #[inline]
    pub fn known(&self, key: Key) -> Option<u64> {
        self.find(key).map(|entry| entry.mean_ns.get())
    }

    /// Returns the GPU-ns charged for an unmeasured kernel: the mean first sample of others, at
    /// most 2 ms.
    #[must_use]
    pub fn unmeasured_cost(&self) -> u64 {
        match self.unmeasured_ns.get() {
            0 => FIRST_NS,
            MOST_UNMEASURED_NS.. => MOST_UNMEASURED_NS,
            ns => ns,
        }
    }

    /// Learns from a sample. Each kernel costs at least 1 us: the resolution of events is coarser
    /// than the shortest kernels, and a kernel that costs nothing would never be measured again.
    pub fn learn(&self, key: Key, gpu_ns: u64) {
        let gpu_ns = gpu_ns.max(LEAST_NS);
        if let Some(entry) = self.find(key) {
            entry.learn(gpu_ns);
            return;
        }
        if let Some(entry) = self.make_room(key) {
            entry.put(key.0, gpu_ns, 1, 0);
        }
        let unmeasured_ns = match self.unmeasured_ns.get() {
            0 => gpu_ns,
            before => blend(before, gpu_ns, MEMORY),
        };
        self.unmeasured_ns.set(unmeasured_ns);
    }

    /// Learns that a kernel took at least `least_ns` and at most `most_ns`.
    pub fn bound(&self, key: Key, least_ns: u64, most_ns: u64) {
        match self.known(key) {
            Some(mean_ns) if (least_ns..=most_ns).contains(&mean_ns) => {}
            Some(mean_ns) => self.learn(key, mean_ns.clamp(least_ns, most_ns.max(least_ns))),
            None => self.learn(key, least_ns.midpoint(most_ns)),
        }
    }

    /// Returns the GPU-ns of a kernel if it was measured several times.
    #[must_use]
    pub fn typical(&self, key: Key) -> Option<u64> {
        self.find(key).filter(|entry| entry.samples() >= TYPICAL).map(|entry| entry.mean_ns.get())
    }

    /// Splits the GPU time of a launch into the part that is usual for its kernel and the excess.
    ///
    /// A kernel of a collective spins while its peer waits for tokens. If that time were charged at
    /// once, its container would wait longer than the peer did, while the peer's next kernel spins:
    /// below 50 %, each wait is longer than the one before.
    #[must_use]
    pub fn usual_part(&self, key: Key, gpu_ns: u64) -> (u64, u64) {
        match self.find(key).map(Entry::usual_ns) {
            Some(usual_ns) if gpu_ns >= least_with_excess(usual_ns) => {
                let usual_ns = usual_ns.saturating_mul(MOST_USUAL);
                (usual_ns, gpu_ns - usual_ns)
            }
            _ => (gpu_ns, 0),
        }
    }

    /// Raises a kernel's mean by 1/64: a kernel that seems longer often enough is.
    pub fn raise(&self, key: Key) {
        if let Some(entry) = self.find(key) {
            entry.mean_ns.set(entry.mean_ns.get().saturating_add(entry.mean_ns.get() / 64));
        }
    }

    /// Returns a free entry, or that with the fewest samples of a full set, in which all entries
    /// age.
    fn make_room(&self, key: Key) -> Option<&Entry> {
        let set = self.set(key);
        if let Some(free) = set.iter().find(|entry| entry.key.get() == 0) {
            return Some(free);
        }
        for entry in set {
            entry.set_usual(entry.usual_ns(), entry.samples() / 2);
        }
        set.iter().min_by_key(|entry| entry.samples())
    }

    /// Learns the GPU time of a kernel under equal turns, and returns its mean.
    pub fn learn_even(&self, key: Key, gpu_ns: u64) -> u64 {
        let Some(entry) = self.find(key) else { return gpu_ns };
        let even_ns = match entry.even_ns.get() {
            0 => gpu_ns,
            before => blend(before, gpu_ns, MEMORY),
        };
        entry.even_ns.set(even_ns);
        even_ns
    }

    /// Forgets a key: another function or graph may get its address.
    pub fn forget(&self, key: Key) {
        if let Some(entry) = self.find(key) {
            entry.put(0, 0, 0, 0);
        }
    }

    /// Lets the next sample of each kernel replace its mean: any of them may be unloaded.
    pub fn invalidate(&self) {
        for entry in self.sets.iter().flatten() {
            entry.set_usual(entry.usual_ns(), 0);
        }
    }

    #[inline]
    fn find(&self, key: Key) -> Option<&Entry> {
        self.set(key).iter().find(|entry| entry.key.get() == key.0)
    }

    /// Returns the set of a key by its high bits, which depend on all its parts.
    #[inline]
    fn set(&self, key: Key) -> &[Entry; WAYS] {
        &self.sets[(key.0 >> (u64::BITS - SETS.ilog2())) as usize]
    }
}

/// Returns the least GPU time with excess.
const fn least_with_excess(usual_ns: u64) -> u64 {
    usual_ns.saturating_mul(MOST_USUAL).saturating_add(LEAST_EXCESS_NS)
}

/// Returns the mean of a sample and of a mean of `samples` samples.
const fn blend(mean: u64, sample: u64, samples: u64) -> u64 {
    if sample >= mean {
        mean + (sample - mean) / (1 + samples)
    } else {
        mean - (mean - sample) / (1 + samples)
    }
}

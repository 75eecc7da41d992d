//! Single requests on every set of free GPUs: their score relative to the best of any set of that
//! size.

use tessera_allocator::topology::{DeviceSet, LinkMatrix, Score};

use super::policies::SetPolicy;

/// Results of a policy for requests of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerRequest {
    /// Requested GPUs.
    pub size: usize,
    /// Mean of score / best score.
    pub mean: f64,
    /// Share of requests with the best score.
    pub optimal: f64,
    /// Lowest score / best score.
    pub worst: f64,
}

/// Returns the policy's results over every set of free GPUs with at least `size` members. Returns
/// `None` if no pair of GPUs scores.
pub fn measure(matrix: &LinkMatrix, policy: &mut dyn SetPolicy, size: usize) -> Option<PerRequest> {
    let best = best_scores(matrix, size);
    let mut result = PerRequest { size, mean: 0.0, optimal: 0.0, worst: 1.0 };
    let mut requests = 0;
    for (bits, &best) in best.iter().enumerate().filter(|(_, best)| **best > 0) {
        let score = matrix.score(policy.choose(DeviceSet::from_bits(bits as u64), size));
        let ratio = f64::from(score) / f64::from(best);
        requests += 1;
        result.mean += ratio;
        result.optimal += f64::from(u8::from(score == best));
        result.worst = result.worst.min(ratio);
    }
    let requests = f64::from(requests);
    (requests > 0.0).then(|| PerRequest {
        mean: result.mean / requests,
        optimal: result.optimal / requests,
        ..result
    })
}

/// Returns the best score of `size` GPUs of each set, by the set's bits; 0 for smaller sets.
fn best_scores(matrix: &LinkMatrix, size: usize) -> Vec<Score> {
    let mut best: Vec<Score> = Vec::with_capacity(1 << matrix.len());
    for bits in 0..1u64 << matrix.len() {
        let set = DeviceSet::from_bits(bits);
        best.push(match set.len().cmp(&size) {
            std::cmp::Ordering::Less => 0,
            std::cmp::Ordering::Equal => matrix.score(set),
            std::cmp::Ordering::Greater => {
                let without = |device| best[(set - DeviceSet::one(device)).bits() as usize];
                set.iter().map(without).max().unwrap_or(0)
            }
        });
    }
    best
}

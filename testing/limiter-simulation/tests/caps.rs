//! Caps are held, whatever is launched, and whoever is there.

use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_simulation::{
    Company, Limiter, MS, Pattern, S, US, Workload, judge, unlimited,
};

const OURS: Limiter = Limiter::Tessera(ComputePolicy::Fixed);
const KERNELS: [u64; 7] = [5 * US, 50 * US, 500 * US, 5 * MS, 50 * MS, 500 * MS, 2 * S];

/// Judges every kernel in that pattern and company; answers what is wrong.
fn wrongs(pattern: Pattern, company: Company, processes: usize, percents: &[u32]) -> Vec<String> {
    let mut wrongs = Vec::new();
    for kernel in KERNELS {
        let workload = Workload { kernel, pattern, processes, company };
        let free = unlimited(&workload, 7);
        for percent in percents {
            let judged = judge(&workload, OURS, *percent, free, 7);
            let neighbour = judged.neighbour.unwrap_or(1.0);
            // Of kernels a little longer than a slice it cannot be told how many turns of others
            // they had in them.
            let coarse = processes > 1 && kernel == 5 * MS && company == Company::Unlimited;
            let long = if coarse { 0.03 } else { 0.02 };
            if !(judged.long <= long && judged.short <= 0.05 && neighbour >= 0.97) {
                wrongs.push(format!("{workload:?} at {percent} %: {judged:?}"));
            }
        }
    }
    wrongs
}

fn held(pattern: Pattern, company: Company) {
    for (processes, percents) in [(1, &[10, 50, 90][..]), (3, &[30, 70]), (8, &[20, 80])] {
        let wrongs = wrongs(pattern, company, processes, percents);
        assert!(wrongs.is_empty(), "{}", wrongs.join("\n"));
    }
}

#[test]
fn caps_hold_for_programs_that_wait_for_every_kernel_and_are_alone() {
    held(Pattern::Sync { gap: 0 }, Company::Nobody);
}

#[test]
fn caps_hold_for_programs_that_never_wait_and_are_alone() {
    held(Pattern::Async, Company::Nobody);
}

#[test]
fn caps_hold_for_graphs_alone() {
    held(Pattern::Graph, Company::Nobody);
}

#[test]
fn caps_hold_for_programs_that_wait_for_every_kernel_beside_one_without_a_limit() {
    held(Pattern::Sync { gap: 0 }, Company::Unlimited);
}

#[test]
fn caps_hold_for_programs_that_never_wait_beside_one_without_a_limit() {
    held(Pattern::Async, Company::Unlimited);
}

#[test]
fn caps_hold_for_graphs_beside_one_without_a_limit() {
    held(Pattern::Graph, Company::Unlimited);
}

#[test]
fn others_are_worse_in_the_same_simulation() {
    let mut errors = Vec::new();
    for limiter in [OURS, Limiter::Aimd, Limiter::Hami] {
        let workload = Workload {
            kernel: 5 * MS,
            pattern: Pattern::Async,
            processes: 1,
            company: Company::Nobody,
        };
        let free = unlimited(&workload, 7);
        let judged = [30, 50, 70].map(|percent| judge(&workload, limiter, percent, free, 7).long);
        errors.push(judged.into_iter().fold(0.0, f64::max));
    }
    assert!(errors[0] * 5.0 < errors[1] && errors[0] * 5.0 < errors[2], "{errors:?}");
}

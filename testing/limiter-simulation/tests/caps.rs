//! Accuracy of caps for all launch patterns and co-tenants.

use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_simulation::{
    CoTenant, Limiter, MS, Pattern, S, US, Workload, measure, unlimited,
};

const TESSERA: Limiter = Limiter::Tessera(ComputePolicy::Fixed);
const KERNELS: [u64; 9] =
    [2 * US, 5 * US, 20 * US, 50 * US, 500 * US, 5 * MS, 50 * MS, 500 * MS, 2 * S];

/// Measures every kernel with a pattern and co-tenant; returns the violations.
fn violations(
    pattern: Pattern,
    co_tenant: CoTenant,
    processes: usize,
    percents: &[u32],
) -> Vec<String> {
    let mut violations = Vec::new();
    for kernel in KERNELS {
        let workload = Workload { processes, co_tenant, ..Workload::new(kernel, pattern) };
        let free = unlimited(&workload, 7);
        for percent in percents {
            let accuracy = measure(&workload, TESSERA, *percent, free, 7);
            let co_tenant_share = accuracy.co_tenant.unwrap_or(1.0);
            // A capped co-tenant has work for a part of the time, which is known too late for long
            // kernels: its own have 10 ms then, and an error of up to 3 points of 10.
            let (long, short, least) = match co_tenant {
                CoTenant::Capped if kernel >= 50 * MS => (0.04, 0.08, 0.8),
                CoTenant::Capped => (0.03, 0.05, 0.97),
                // One kernel more or less of the 50 of a long window is 2 points.
                CoTenant::Unlimited if kernel >= 500 * MS => (0.022, 0.05, 0.97),
                CoTenant::None | CoTenant::Unlimited => (0.02, 0.05, 0.97),
            };
            if !(accuracy.long <= long && accuracy.short <= short && co_tenant_share >= least) {
                violations.push(format!("{workload:?} at {percent} %: {accuracy:?}"));
            }
        }
    }
    violations
}

fn assert_caps_hold(pattern: Pattern, co_tenant: CoTenant) {
    for (processes, percents) in [(1, &[10, 50, 90][..]), (3, &[30, 70]), (8, &[20, 80])] {
        let violations = violations(pattern, co_tenant, processes, percents);
        assert!(violations.is_empty(), "{}", violations.join("\n"));
    }
}

#[test]
fn caps_hold_for_sync_launches_alone() {
    assert_caps_hold(Pattern::Sync { gap: 0 }, CoTenant::None);
}

#[test]
fn caps_hold_for_async_launches_alone() {
    assert_caps_hold(Pattern::Async, CoTenant::None);
}

#[test]
fn caps_hold_for_graphs_alone() {
    assert_caps_hold(Pattern::Graph, CoTenant::None);
}

#[test]
fn caps_hold_for_sync_launches_beside_unlimited_co_tenant() {
    assert_caps_hold(Pattern::Sync { gap: 0 }, CoTenant::Unlimited);
}

#[test]
fn caps_hold_for_async_launches_beside_unlimited_co_tenant() {
    assert_caps_hold(Pattern::Async, CoTenant::Unlimited);
}

#[test]
fn caps_hold_for_graphs_beside_unlimited_co_tenant() {
    assert_caps_hold(Pattern::Graph, CoTenant::Unlimited);
}

#[test]
fn caps_hold_beside_capped_co_tenant() {
    for pattern in [Pattern::Sync { gap: 0 }, Pattern::Async] {
        for (processes, percents) in [(1, &[10, 50, 80][..]), (3, &[40])] {
            let violations = violations(pattern, CoTenant::Capped, processes, percents);
            assert!(violations.is_empty(), "{}", violations.join("\n"));
        }
    }
}

/// Until the host publishes the contention, turns of a co-tenant are within samples that stand
/// for hundreds of launches. With these seeds, one cost the program 8 % of its speed.
#[test]
fn first_samples_beside_a_co_tenant_cost_no_speed() {
    for (kernel, seed) in [(3 * US, 1), (3 * US, 6), (4 * US, 3), (4 * US, 6)] {
        let workload =
            Workload { co_tenant: CoTenant::Unlimited, ..Workload::new(kernel, Pattern::Async) };
        let free = unlimited(&workload, seed);
        let accuracy = measure(&workload, TESSERA, 50, free, seed);
        assert!(accuracy.long < 0.01, "{kernel} ns, seed {seed}: {accuracy:?}");
    }
}

#[test]
fn other_limiters_are_less_accurate() {
    let mut errors = Vec::new();
    for limiter in [TESSERA, Limiter::Aimd, Limiter::Hami] {
        let workload = Workload::new(5 * MS, Pattern::Async);
        let free = unlimited(&workload, 7);
        let errors_by_cap =
            [30, 50, 70].map(|percent| measure(&workload, limiter, percent, free, 7).long);
        errors.push(errors_by_cap.into_iter().fold(0.0, f64::max));
    }
    assert!(errors[0] * 5.0 < errors[1] && errors[0] * 5.0 < errors[2], "{errors:?}");
}

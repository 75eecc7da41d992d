//! Part of a GPU's time that grants entitle a container to.

use tessera_intercept_abi::ComputePolicy;

use crate::compute::{Published, Rate};

/// Part of a GPU's time that a grant entitles a container to, and how it is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entitlement {
    /// Policy of the grant.
    pub policy: ComputePolicy,
    /// Cores of the grant. [`Rate::LEAST`] under [`ComputePolicy::Balance`] without cores,
    /// [`Rate::FULL`] under [`ComputePolicy::None`].
    pub share: Rate,
    /// True if the grant names cores.
    pub is_guaranteed: bool,
}

impl Entitlement {
    /// Not limited.
    pub const UNLIMITED: Self =
        Self { policy: ComputePolicy::None, share: Rate::FULL, is_guaranteed: false };

    /// Returns the entitlement of a grant.
    #[must_use]
    pub const fn of_grant(policy: ComputePolicy, cores_percent: u32) -> Self {
        match (policy, cores_percent) {
            (ComputePolicy::None, _) | (ComputePolicy::Fixed, 0) => Self::UNLIMITED,
            (ComputePolicy::Balance, 0) => {
                Self { policy, share: Rate::LEAST, is_guaranteed: false }
            }
            _ => Self { policy, share: Rate::from_percent(cores_percent), is_guaranteed: true },
        }
    }

    /// Adds another grant of the same GPU. The least strict policy of the two applies.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        let policy = match (self.policy, other.policy) {
            (ComputePolicy::None, _) | (_, ComputePolicy::None) => return Self::UNLIMITED,
            (ComputePolicy::Balance, _) | (_, ComputePolicy::Balance) => ComputePolicy::Balance,
            (ComputePolicy::Fixed, ComputePolicy::Fixed) => ComputePolicy::Fixed,
        };
        let share = Rate::new(self.share.hundredths().saturating_add(other.share.hundredths()));
        Self { policy, share, is_guaranteed: self.is_guaranteed || other.is_guaranteed }
    }

    /// Returns the entitlement that applies while the host publishes, or does not. Without a
    /// guarantee and without the host, nothing says what others leave, so nothing is limited. A
    /// container that is entitled to the whole GPU is not limited either. Guaranteed cores are
    /// scaled down as the host says.
    #[must_use]
    pub fn with(self, published: Option<Published>) -> Self {
        let is_unknown =
            self.policy == ComputePolicy::Balance && !self.is_guaranteed && published.is_none();
        let scale = published.filter(|_| self.is_guaranteed).map_or(Rate::FULL, |host| host.scale);
        let share = scale.of(self.share);
        if is_unknown || share == Rate::FULL { Self::UNLIMITED } else { Self { share, ..self } }
    }

    /// Returns the rate of the container's token bucket; `None` if launches need no tokens.
    #[must_use]
    pub fn rate(self, published: Option<Published>) -> Option<Rate> {
        let applied = self.with(published);
        let rate = match applied.policy {
            ComputePolicy::None => return None,
            ComputePolicy::Fixed => applied.share,
            ComputePolicy::Balance => {
                published.map_or(applied.share, |published| published.rate.max(applied.share))
            }
        };
        (rate < Rate::FULL).then_some(rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::Contention;

    const PUBLISHED: Published = Published {
        rate: Rate::from_percent(60),
        others: Contention::NONE,
        others_busy_ns: 0,
        stamp_ms: 0,
        is_metered: true,
        scale: Rate::FULL,
    };

    #[test]
    fn host_raises_the_rate_of_balance_only() {
        let balance = Entitlement::of_grant(ComputePolicy::Balance, 25);
        let fixed = Entitlement::of_grant(ComputePolicy::Fixed, 25);
        assert_eq!(balance.rate(None), Some(Rate::from_percent(25)));
        assert_eq!(balance.rate(Some(PUBLISHED)), Some(Rate::from_percent(60)));
        assert_eq!(fixed.rate(Some(PUBLISHED)), Some(Rate::from_percent(25)));
        let lower = Published { rate: Rate::from_percent(10), ..PUBLISHED };
        assert_eq!(balance.rate(Some(lower)), Some(Rate::from_percent(25)));
    }

    #[test]
    fn host_scales_guaranteed_cores_down() {
        let half =
            Published { rate: Rate::from_percent(5), scale: Rate::from_percent(50), ..PUBLISHED };
        for (policy, cores, rate) in [
            (ComputePolicy::Fixed, 60, 30),
            (ComputePolicy::Fixed, 100, 50),
            (ComputePolicy::Balance, 60, 30),
            (ComputePolicy::Balance, 100, 50),
        ] {
            let entitlement = Entitlement::of_grant(policy, cores);
            assert_eq!(entitlement.rate(Some(half)), Some(Rate::from_percent(rate)), "{policy:?}");
            let whole = (cores < 100).then_some(Rate::from_percent(cores));
            assert_eq!(entitlement.rate(None), whole, "without the host");
        }
        let none = Entitlement::of_grant(ComputePolicy::Balance, 0);
        assert_eq!(none.rate(Some(half)), Some(Rate::from_percent(5)), "nothing was guaranteed");
    }

    #[test]
    fn balance_without_cores_needs_the_host() {
        let none = Entitlement::of_grant(ComputePolicy::Balance, 0);
        assert_eq!((none.rate(None), none.with(None)), (None, Entitlement::UNLIMITED));
        assert_eq!(none.rate(Some(PUBLISHED)), Some(Rate::from_percent(60)));
        let one = Entitlement::of_grant(ComputePolicy::Balance, 1);
        assert_eq!(one.rate(None), Some(Rate::from_percent(1)), "a guarantee of 1 % is one");
    }

    #[test]
    fn grants_of_one_gpu_add_up_under_the_least_strict_policy() {
        let of = Entitlement::of_grant;
        let both = of(ComputePolicy::Fixed, 25).and(of(ComputePolicy::Balance, 50));
        assert_eq!((both.policy, both.share), (ComputePolicy::Balance, Rate::from_percent(75)));
        assert_eq!(both.and(of(ComputePolicy::Fixed, 0)), Entitlement::UNLIMITED);
        let whole = of(ComputePolicy::Fixed, 50).and(of(ComputePolicy::Fixed, 50));
        assert_eq!((whole.rate(None), whole.with(None)), (None, Entitlement::UNLIMITED));
    }
}

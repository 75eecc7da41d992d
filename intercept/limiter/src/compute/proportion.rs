//! Proportional part of an amount.

/// Returns `value * part / whole` rounded down, or `u64::MAX` if that is more. Exact while `part`
/// and `whole` are below 2^32; otherwise only the highest 32 bits of the larger count, so that the
/// result is inexact if the whole is far below its part. `whole` is not 0.
///
/// Divides 64 bits only: 128 bits are divided by a function of Rust's runtime, which for aarch64
/// may need an unwinding personality. A library without `std` has none; it links, but no program
/// can load it.
pub(super) const fn in_proportion(value: u64, part: u64, whole: u64) -> u64 {
    let surplus = 32_u32.saturating_sub((part | whole).leading_zeros());
    let (part, whole) = (part >> surplus, whole >> surplus);
    let whole = if whole == 0 { 1 } else { whole };
    (value / whole).saturating_mul(part).saturating_add(value % whole * part / whole)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::in_proportion;

    proptest! {
        #[test]
        fn small_parts_are_exact(value: u64, part: u32, whole in 1..=u32::MAX) {
            let exact = u128::from(value) * u128::from(part) / u128::from(whole);
            let expected = u64::try_from(exact).unwrap_or(u64::MAX);
            prop_assert_eq!(in_proportion(value, part.into(), whole.into()), expected);
        }

        #[test]
        fn large_parts_of_a_whole_are_off_by_less_than_a_thousandth(
            value in 1_000_u64..1 << 60,
            whole in 1_u64 << 32..,
            percent in 1_u64..=100,
        ) {
            let part = whole / 100 * percent;
            let exact = u128::from(value) * u128::from(part) / u128::from(whole);
            let off = exact.abs_diff(in_proportion(value, part, whole).into());
            prop_assert!(off <= exact / 1_000 + 1, "{off} of {exact}");
        }

        #[test]
        fn nothing_overflows(value: u64, part: u64, whole in 1_u64..) {
            in_proportion(value, part, whole);
        }
    }
}

use proptest::prelude::*;

use super::*;

fn q(text: &str) -> Quantity {
    Quantity::parse(text).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_same_amount_in_different_notations_is_equal() {
    assert_eq!(q("1Gi"), q("1024Mi"));
    assert_eq!(q("1Gi"), q("1073741824"));
    assert_eq!(q("0.5"), q("500m"));
    assert_eq!(q("1e3"), q("1k"));
    assert!(q("1G") < q("1Gi"));
}

#[test]
fn keeps_the_notation_it_was_written_in() {
    assert_eq!(q("81559Mi").to_string(), "81559Mi");
    assert_eq!(q("19Gi").to_string(), "19Gi");
    assert_eq!(q("2048Ki").to_string(), "2Mi");
    assert_eq!(q("2000k").to_string(), "2M");
    assert_eq!(q("2e7").to_string(), "20e6");
    assert_eq!(q("1.5Gi").to_string(), "1536Mi");
}

#[test]
fn binary_amounts_below_1024_or_with_a_fraction_print_as_decimals() {
    assert_eq!(q("0.5Ki").to_string(), "512");
    assert_eq!(q("1.0001Ki").to_string(), "1024102400u");
}

#[test]
fn what_is_finer_than_a_billionth_moves_away_from_zero() {
    assert_eq!(q("0.1n"), q("1n"));
    assert_eq!(q("-0.1n"), q("-1n"));
    assert_eq!(q("1.0000000001n"), q("2n"));
}

#[test]
fn whole_units_and_thousandths_round_away_from_zero() {
    assert_eq!((q("1.1").value(), q("-1.1").value(), q("7").value()), (2, -2, 7));
    assert_eq!((q("1.1m").milli(), q("-1.1m").milli(), q("7m").milli()), (2, -2, 7));
    assert_eq!(q("1.5").as_exact_i64(), None);
    assert_eq!(q("1500m").as_exact_i64(), None);
    assert_eq!(q("2000m").as_exact_i64(), Some(2));
    assert_eq!(q("1e20").value_i64(), None);
}

#[test]
fn binary_amounts_are_capped_where_upstream_caps_them() {
    assert_eq!(q("8Ei").value(), i128::from(i64::MAX));
    assert_eq!(q("99999999999999999999999999999999999999999999Ei").value(), i128::from(i64::MAX));
    assert_eq!(q("-8Ei").value(), -i128::from(i64::MAX));
}

#[test]
fn amounts_that_cannot_be_kept_exactly_are_refused() {
    for text in ["1e30", "1e2000000000", "999999999999999999999999999999999E"] {
        assert_eq!(Quantity::parse(text), Err(QuantityError::TooLarge { text: text.to_owned() }));
    }
}

#[test]
fn errors_name_the_text_and_say_what_is_wanted() {
    assert_eq!(
        Quantity::parse("19GiB").unwrap_err().to_string(),
        "`19GiB` is not a quantity; write a number and a suffix, such as `19Gi`, `500m` or `25`"
    );
    assert_eq!(
        Quantity::parse("19K").unwrap_err().to_string(),
        "the quantity `19K` has the unknown suffix `K`; \
         known are n u m k M G T P E, Ki Mi Gi Ti Pi Ei and exponents such as e3"
    );
}

#[test]
fn sums_take_the_notation_of_the_first_summand_that_is_not_zero() {
    assert_eq!(
        q("1Gi").checked_add(q("1024")).map(|sum| sum.to_string()),
        Some("1048577Ki".to_owned())
    );
    assert_eq!(
        Quantity::ZERO.checked_add(q("2Gi")).map(|sum| sum.to_string()),
        Some("2Gi".to_owned())
    );
    assert_eq!(
        q("2Gi").checked_sub(q("3Gi")).map(|rest| rest.to_string()),
        Some("-1Gi".to_owned())
    );
    assert_eq!(q("2Gi").saturating_sub(q("3Gi")), Quantity::ZERO);
    assert_eq!(q("1.7e29").checked_add(q("1.7e29")), None);
}

#[test]
fn bytes_and_mib_round_towards_the_safe_side() {
    assert_eq!(Quantity::from_mib(81559), Quantity::from_bytes(81559 << 20));
    assert_eq!(q("1.5").bytes(), Some(2), "a request is rounded up");
    assert_eq!(q("2047Ki").floor_mib(), Some(1), "what is published is rounded down");
    assert_eq!((q("-1").bytes(), q("-1").floor_mib()), (None, None));
    assert_eq!(Quantity::from_bytes(u64::MAX).bytes(), Some(u64::MAX));
}

#[test]
fn json_may_hold_a_string_or_a_whole_number() {
    assert_eq!(serde_json::from_str::<Quantity>("\" 19Gi \"").ok(), Some(q("19Gi")));
    assert_eq!(serde_json::from_str::<Quantity>("25").ok(), Some(q("25")));
    assert_eq!(serde_json::from_str::<Quantity>("-25").ok(), Some(q("-25")));
    assert!(serde_json::from_str::<Quantity>("true").is_err());
    assert_eq!(serde_json::to_string(&q("19Gi")).ok(), Some("\"19Gi\"".to_owned()));
}

fn format() -> impl Strategy<Value = Format> {
    prop_oneof![Just(Format::DecimalSi), Just(Format::BinarySi), Just(Format::DecimalExponent)]
}

prop_compose! {
    /// Amounts of all sizes: small ones with fractions, and up to the cap of binary notation.
    fn quantity()(
        nano in prop_oneof![-3_000_000_000_i128..3_000_000_000, any::<i64>().prop_map(|v| i128::from(v) * NANO),
                            (-1_000_000_000_000_000_000_000_000_i128..1_000_000_000_000_000_000_000_000)],
        format in format(),
    ) -> Quantity {
        Quantity { nano: nano.clamp(-i128::from(i64::MAX) * NANO, i128::from(i64::MAX) * NANO), format }
    }
}

proptest! {
    #[test]
    fn printing_and_parsing_keeps_the_amount(quantity in quantity()) {
        prop_assert_eq!(q(&quantity.to_string()), quantity);
    }

    #[test]
    fn the_canonical_form_of_what_was_read_is_a_fixed_point(quantity in quantity()) {
        // Not that of any amount: as in Kubernetes, a binary one of 1500000 is written without a
        // suffix, which reads as decimal.
        let read = q(&quantity.to_string()).to_string();
        prop_assert_eq!(q(&read).to_string(), read);
    }

    #[test]
    fn a_binary_amount_that_no_power_of_1024_divides_is_written_in_full(thousands in 2i128..1_000_000) {
        prop_assume!(thousands % 128 != 0);
        let amount = Quantity { nano: thousands * 1000 * 1_000_000_000, format: Format::BinarySi };
        let written = amount.to_string();
        prop_assert_eq!(&written, &(thousands * 1000).to_string());
        prop_assert_eq!(q(&written).nano(), amount.nano());
    }

    #[test]
    fn order_and_sums_are_those_of_the_amounts(a in quantity(), b in quantity()) {
        prop_assert_eq!(a.cmp(&b), a.nano().cmp(&b.nano()));
        let sum = a.checked_add(b).expect("far from overflow");
        prop_assert_eq!(sum.checked_sub(b), Some(a));
        prop_assert_eq!(a.checked_add(b), b.checked_add(a));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "[-+]?[0-9.]{0,60}[eEinumkKMGTP]{0,3}[-+]?[0-9]{0,12}|.{0,20}") {
        if let Ok(parsed) = Quantity::parse(&text) {
            prop_assert_eq!(q(&parsed.to_string()), parsed);
        }
    }

    #[test]
    fn values_round_away_from_zero_by_less_than_one(quantity in quantity()) {
        let distance = quantity.value() * NANO - quantity.nano();
        prop_assert!(distance.abs() < NANO);
        prop_assert!(distance == 0 || distance.signum() == quantity.nano().signum());
    }
}

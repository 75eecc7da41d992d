//! Quantities against what apimachinery 0.37.1 makes of the same texts
//! (`tests/quantity/generate.go` wrote the goldens).

use serde::Deserialize;
use tessera_api::Quantity;
use tessera_api::quantity::QuantityError;

const GOLDENS: &str = include_str!("quantity/golden.jsonl");

/// From here on apimachinery prints decimal amounts without their suffix, which we do not copy.
const PRINTED_WRONG_BY_UPSTREAM: u128 = 1_000_000_000_000_000_000_000 * 1_000_000_000;

#[derive(Deserialize)]
struct Golden {
    text: String,
    #[serde(default)]
    error: bool,
    #[serde(default)]
    canonical: String,
    #[serde(default)]
    nano: String,
    value: Option<i64>,
    milli: Option<i64>,
}

fn goldens() -> Vec<Golden> {
    GOLDENS.lines().map(|line| serde_json::from_str(line).expect("a golden")).collect()
}

#[test]
fn accepts_exactly_the_texts_that_apimachinery_accepts() {
    for golden in goldens() {
        let parsed = Quantity::parse(&golden.text);
        let beyond = golden.nano.parse::<i128>().is_err() && !golden.error;
        match parsed {
            Err(QuantityError::TooLarge { .. }) => {
                assert!(beyond, "{:?} is not too large", golden.text)
            }
            _ => assert_eq!(parsed.is_err(), golden.error, "{:?}: {parsed:?}", golden.text),
        }
    }
}

#[test]
fn amounts_values_and_canonical_forms_are_those_of_apimachinery() {
    let mut compared = 0;
    for golden in goldens().iter().filter(|golden| !golden.error) {
        let Ok(nano) = golden.nano.parse::<i128>() else { continue };
        let parsed = Quantity::parse(&golden.text).expect("accepted by the other test");
        assert_eq!(parsed.nano(), nano, "{:?}", golden.text);
        if nano.unsigned_abs() < PRINTED_WRONG_BY_UPSTREAM {
            assert_eq!(parsed.to_string(), golden.canonical, "{:?}", golden.text);
        }
        if let Some(value) = golden.value {
            assert_eq!(parsed.value(), i128::from(value), "{:?}", golden.text);
        }
        if let Some(milli) = golden.milli {
            assert_eq!(parsed.milli(), i128::from(milli), "{:?}", golden.text);
        }
        compared += 1;
    }
    assert!(compared > 1000, "only {compared} goldens were compared");
}

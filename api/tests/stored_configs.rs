//! Configs that clusters have stored: claims are immutable and classes live long, so that each
//! version once released is decoded for ever. Files in `stored/` are only added, never changed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::Value;
use tessera_api::GpuConfig;
use tessera_api::config::FIELDS;

const V1ALPHA1: &str = include_str!("stored/v1alpha1.json");

#[test]
fn stored_configs_are_decoded() {
    let stored: Vec<Value> = serde_json::from_str(V1ALPHA1).unwrap();
    assert!(!stored.is_empty());
    for parameters in stored {
        GpuConfig::decode(&parameters).unwrap_or_else(|error| panic!("{error}: {parameters}"));
    }
}

#[test]
fn stored_configs_have_every_field_and_value() {
    for field in FIELDS {
        let name = field.path.rsplit('.').next().unwrap();
        assert!(V1ALPHA1.contains(&format!("\"{name}\":")), "{}", field.path);
        for (value, _) in (field.values)() {
            assert!(V1ALPHA1.contains(&format!("\"{value}\"")), "{}: {value}", field.path);
        }
    }
}

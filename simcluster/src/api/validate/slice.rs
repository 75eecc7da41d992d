//! ResourceSlices (resource.k8s.io/v1): limits, names, request policies.

use std::collections::HashSet;

use serde_json::Value;

use super::super::error::FieldError;
use super::super::quantity::{self, Nano};
use super::{claim, names};

const DEVICES: usize = 128;
/// Taints, counters and list attributes make devices bigger, so that a slice holds fewer.
const DEVICES_WITH_EXTRAS: usize = 64;
const ATTRIBUTES_AND_CAPACITY: usize = 32;
const TAINTS: usize = 16;
const COUNTER_SETS: usize = 8;
const VALID_VALUES: usize = 10;
const ATTRIBUTE_BYTES: usize = 64;

fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object[field].as_str().unwrap_or_default()
}

fn list<'a>(object: &'a Value, field: &str) -> &'a [Value] {
    object[field].as_array().map(Vec::as_slice).unwrap_or_default()
}

pub(super) fn spec(spec: &Value, errors: &mut Vec<FieldError>) {
    names::subdomain("spec.driver", text(spec, "driver"), 63, errors);
    claim::pool_name("spec.pool.name", text(&spec["pool"], "name"), errors);
    if spec["pool"]["resourceSliceCount"].as_i64().unwrap_or(0) < 1 {
        let count = spec["pool"]["resourceSliceCount"].clone();
        errors.push(FieldError::invalid("spec.pool.resourceSliceCount", count, "must be greater than zero"));
    }
    if spec["pool"]["generation"].as_i64().unwrap_or(0) < 0 {
        let generation = spec["pool"]["generation"].clone();
        errors.push(FieldError::invalid(
            "spec.pool.generation",
            generation,
            "must be greater than or equal to zero",
        ));
    }
    node_choice(spec, errors);
    let devices = list(spec, "devices");
    let most = if devices.iter().any(has_extras) { DEVICES_WITH_EXTRAS } else { DEVICES };
    if devices.len() > most {
        errors.push(FieldError::too_many("spec.devices", devices.len(), most));
    }
    let counter_sets = list(spec, "sharedCounters");
    if counter_sets.len() > COUNTER_SETS {
        errors.push(FieldError::too_many("spec.sharedCounters", counter_sets.len(), COUNTER_SETS));
    }
    if !devices.is_empty() && !counter_sets.is_empty() {
        errors.push(FieldError::invalid("spec", "", "only one of `sharedCounters` or `devices` is allowed"));
    }
    let mut seen = HashSet::new();
    for (index, device) in devices.iter().enumerate() {
        let at = format!("spec.devices[{index}]");
        let name = text(device, "name");
        names::label(&format!("{at}.name"), name, errors);
        if !seen.insert(name) {
            errors.push(FieldError::duplicate(format!("{at}.name"), name));
        }
        self::device(device, &at, errors);
    }
}

/// Driver, pool and node of a slice never change.
pub(super) fn spec_update(new: &Value, old: &Value, errors: &mut Vec<FieldError>) {
    let mut fixed = |field: &str, new: &Value, old: &Value| {
        if new != old {
            errors.push(FieldError::invalid(field, new.clone(), "field is immutable"));
        }
    };
    fixed("spec.driver", &new["driver"], &old["driver"]);
    fixed("spec.pool.name", &new["pool"]["name"], &old["pool"]["name"]);
    fixed("spec.nodeName", &new["nodeName"], &old["nodeName"]);
}

fn has_extras(device: &Value) -> bool {
    let list_attribute =
        |attribute: &Value| ["ints", "bools", "strings", "versions"].iter().any(|f| attribute[f].is_array());
    !list(device, "taints").is_empty()
        || !list(device, "consumesCounters").is_empty()
        || device["attributes"].as_object().into_iter().flatten().any(|(_, value)| list_attribute(value))
}

fn node_choice(spec: &Value, errors: &mut Vec<FieldError>) {
    let chosen = [
        !text(spec, "nodeName").is_empty(),
        spec["nodeSelector"].is_object(),
        spec["allNodes"] == true,
        spec["perDeviceNodeSelection"] == true,
    ];
    let rule = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
    match chosen.iter().filter(|chosen| **chosen).count() {
        0 => errors.push(FieldError::required("spec", rule)),
        1 => {}
        _ => errors.push(FieldError::invalid("spec", "", rule)),
    }
}

fn device(device: &Value, at: &str, errors: &mut Vec<FieldError>) {
    let attributes = device["attributes"].as_object();
    let capacity = device["capacity"].as_object();
    let total = attributes.map_or(0, |map| map.len()) + capacity.map_or(0, |map| map.len());
    if total > ATTRIBUTES_AND_CAPACITY {
        errors.push(FieldError::too_many(at, total, ATTRIBUTES_AND_CAPACITY));
    }
    for (name, attribute) in attributes.into_iter().flatten() {
        qualified_name(&format!("{at}.attributes"), name, errors);
        self::attribute(attribute, &format!("{at}.attributes[{name}]"), errors);
    }
    let shared = device["allowMultipleAllocations"] == true;
    for (name, amount) in capacity.into_iter().flatten() {
        qualified_name(&format!("{at}.capacity"), name, errors);
        self::capacity(amount, shared, &format!("{at}.capacity[{name}]"), errors);
    }
    let taints = list(device, "taints");
    if taints.len() > TAINTS {
        errors.push(FieldError::too_many(format!("{at}.taints"), taints.len(), TAINTS));
    }
    for (index, taint) in taints.iter().enumerate() {
        names::qualified(&format!("{at}.taints[{index}].key"), text(taint, "key"), errors);
        let effect = text(taint, "effect");
        if !["None", "NoSchedule", "NoExecute"].contains(&effect) {
            let at = format!("{at}.taints[{index}].effect");
            errors.push(FieldError::not_supported(at, effect, &["NoExecute", "NoSchedule", "None"]));
        }
    }
}

/// `[domain/]C_identifier`, the identifier at most 32 characters.
fn qualified_name(at: &str, name: &str, errors: &mut Vec<FieldError>) {
    let (domain, id) = match name.split_once('/') {
        Some((domain, id)) => (Some(domain), id),
        None => (None, name),
    };
    if let Some(domain) = domain {
        names::subdomain(at, domain, 63, errors);
    }
    let identifier = |id: &str| {
        id.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            && !id.starts_with(|c: char| c.is_ascii_digit())
    };
    if id.is_empty() {
        errors.push(FieldError::required(at, "name must not be empty"));
    } else if id.len() > 32 {
        errors.push(FieldError::too_long(at, 32));
    } else if !identifier(id) {
        let rule = "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is '[A-Za-z_][A-Za-z0-9_]*')";
        errors.push(FieldError::invalid(at, id, rule));
    }
}

fn attribute(attribute: &Value, at: &str, errors: &mut Vec<FieldError>) {
    let set = attribute.as_object().map_or(0, |map| map.len());
    if set != 1 {
        errors.push(FieldError::invalid(at, attribute.clone(), "exactly one value must be specified"));
    }
    for field in ["string", "version"] {
        if text(attribute, field).len() > ATTRIBUTE_BYTES {
            errors.push(FieldError::too_long(format!("{at}.{field}"), ATTRIBUTE_BYTES));
        }
    }
    if let Some(version) = attribute["version"].as_str()
        && !is_semver(version)
    {
        let rule = "must be a string compatible with semver.org spec 2.0.0";
        errors.push(FieldError::invalid(format!("{at}.version"), version, rule));
    }
}

/// Semantic version 2.0.0, with the exact grammar: no leading zeros, no `v`.
fn is_semver(text: &str) -> bool {
    let (text, build) = text.split_once('+').map_or((text, None), |(text, build)| (text, Some(build)));
    let (core, pre) = text.split_once('-').map_or((text, None), |(core, pre)| (core, Some(pre)));
    let number = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|b| b.is_ascii_digit())
            && (part == "0" || !part.starts_with('0'))
    };
    let identifier =
        |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let numeric_ok = |part: &str| !part.bytes().all(|b| b.is_ascii_digit()) || number(part);
    core.split('.').count() == 3
        && core.split('.').all(number)
        && pre.is_none_or(|pre| pre.split('.').all(|part| identifier(part) && numeric_ok(part)))
        && build.is_none_or(|build| build.split('.').all(identifier))
}

fn capacity(capacity: &Value, shared: bool, at: &str, errors: &mut Vec<FieldError>) {
    let Some(value) = capacity["value"].as_str().and_then(quantity::parse) else {
        errors.push(FieldError::invalid(
            format!("{at}.value"),
            capacity["value"].clone(),
            "must be a quantity",
        ));
        return;
    };
    let policy = &capacity["requestPolicy"];
    if policy.is_null() {
        return;
    }
    let at = format!("{at}.requestPolicy");
    if !shared {
        let rule = "allowed only when allowMultipleAllocations is true";
        errors.push(FieldError::forbidden(at, rule));
        return;
    }
    Policy { policy, value, at: &at, errors }.check();
}

/// The rules of a request policy, for one capacity.
struct Policy<'a> {
    policy: &'a Value,
    value: Nano,
    at: &'a str,
    errors: &'a mut Vec<FieldError>,
}

impl Policy<'_> {
    fn check(&mut self) {
        let default = self.amount(&self.policy["default"], "default");
        let (values, range) = (self.policy["validValues"].is_array(), self.policy["validRange"].is_object());
        if values && range {
            self.wrong("", "exactly one of `validValues`, `validRange` may be specified");
        }
        if (values || range) && self.policy["default"].is_null() {
            let at = format!("{}.default", self.at);
            self.errors.push(FieldError::required(at, "required with validValues or validRange"));
        }
        if default.is_some_and(|default| default > self.value) {
            self.wrong("default", "must not exceed the capacity");
        }
        if values {
            self.values(default);
        }
        if range {
            self.range(default);
        }
    }

    fn wrong(&mut self, field: &str, rule: &str) {
        let at = if field.is_empty() { self.at.to_owned() } else { format!("{}.{field}", self.at) };
        self.errors.push(FieldError::invalid(at, self.policy.clone(), rule));
    }

    fn amount(&mut self, value: &Value, field: &str) -> Option<Nano> {
        if value.is_null() {
            return None;
        }
        let amount = value.as_str().and_then(quantity::parse);
        if amount.is_none() {
            self.wrong(field, "must be a quantity");
        }
        amount
    }

    fn values(&mut self, default: Option<Nano>) {
        let listed = self.policy["validValues"].as_array().cloned().unwrap_or_default();
        if listed.len() > VALID_VALUES {
            self.errors.push(FieldError::too_many(
                format!("{}.validValues", self.at),
                listed.len(),
                VALID_VALUES,
            ));
        }
        let amounts: Vec<Nano> =
            listed.iter().filter_map(|value| self.amount(value, "validValues")).collect();
        if !amounts.is_sorted() {
            self.wrong("validValues", "must be sorted in ascending order");
        }
        if amounts.iter().any(|amount| *amount > self.value) {
            self.wrong("validValues", "must not exceed the capacity");
        }
        if default.is_some_and(|default| !amounts.contains(&default)) {
            self.wrong("default", "must be one of validValues");
        }
    }

    fn range(&mut self, default: Option<Nano>) {
        let range = self.policy["validRange"].clone();
        let Some(min) = self.amount(&range["min"], "validRange.min") else {
            let at = format!("{}.validRange.min", self.at);
            self.errors.push(FieldError::required(at, ""));
            return;
        };
        let max = self.amount(&range["max"], "validRange.max");
        let step = self.amount(&range["step"], "validRange.step");
        if min > self.value || max.is_some_and(|max| max > self.value || max < min) {
            self.wrong("validRange", "min must not exceed max, and neither the capacity");
        }
        if default.is_some_and(|default| default < min || max.is_some_and(|max| default > max)) {
            self.wrong("default", "must be inside validRange");
        }
        let Some(Nano(step)) = step else { return };
        if step <= 0 || min.0 + step > self.value.0 {
            self.wrong(
                "validRange.step",
                "must be greater than zero, and min plus step must not exceed the capacity",
            );
            return;
        }
        let off_grid = |amount: Option<Nano>| amount.is_some_and(|amount| (amount.0 - min.0) % step != 0);
        if off_grid(default) {
            self.wrong("default", "must be a multiple of the step from min");
        }
        if off_grid(max) {
            self.wrong("validRange.max", "must be a multiple of the step from min");
        }
    }
}

//! ResourceClaims, their templates and DeviceClasses (resource.k8s.io/v1).
//!
//! As upstream, only the form of a status is checked, not whether devices exist, capacities suffice
//! or other claims hold them. CEL expressions are not compiled.

use serde_json::Value;

use super::super::error::FieldError;
use super::super::meta;
use super::names;

const REQUESTS: usize = 32;
const SUB_REQUESTS: usize = 8;
const SELECTORS: usize = 32;
const CONSTRAINTS: usize = 32;
const CONFIG: usize = 32;
const ALLOCATED_CONFIG: usize = 64;
const RESULTS: usize = 32;
const TOLERATIONS: usize = 16;
const RESERVED_FOR: usize = 256;
const EXPRESSION_BYTES: usize = 10 * 1024;
const PARAMETERS_BYTES: usize = 10 * 1024;

fn items<'a>(
    list: &'a Value,
    field: &str,
    most: usize,
    errors: &mut Vec<FieldError>,
) -> &'a [Value] {
    let items = list.as_array().map(Vec::as_slice).unwrap_or_default();
    if items.len() > most {
        errors.push(FieldError::too_many(field, items.len(), most));
    }
    items
}

fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object[field].as_str().unwrap_or_default()
}

pub(super) fn spec(spec: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let devices = &spec["devices"];
    let at = format!("{path}.devices");
    let mut known = Vec::new();
    for (index, request) in
        items(&devices["requests"], &format!("{at}.requests"), REQUESTS, errors).iter().enumerate()
    {
        self::request(request, &format!("{at}.requests[{index}]"), &mut known, errors);
    }
    let constraints =
        items(&devices["constraints"], &format!("{at}.constraints"), CONSTRAINTS, errors);
    for (index, constraint) in constraints.iter().enumerate() {
        let at = format!("{at}.constraints[{index}]");
        references(constraint, &at, &known, errors);
        match (constraint["matchAttribute"].as_str(), constraint["distinctAttribute"].as_str()) {
            (Some(attribute), None) => {
                attribute_name(&format!("{at}.matchAttribute"), attribute, errors)
            }
            (None, Some(attribute)) => {
                attribute_name(&format!("{at}.distinctAttribute"), attribute, errors)
            }
            _ => errors
                .push(FieldError::required(at, "exactly one of matchAttribute, distinctAttribute")),
        }
    }
    for (index, config) in
        items(&devices["config"], &format!("{at}.config"), CONFIG, errors).iter().enumerate()
    {
        let at = format!("{at}.config[{index}]");
        references(config, &at, &known, errors);
        opaque(config, &at, errors);
    }
}

pub(super) fn class(spec: &Value, errors: &mut Vec<FieldError>) {
    selectors(spec, "spec", errors);
    for (index, config) in items(&spec["config"], "spec.config", CONFIG, errors).iter().enumerate()
    {
        opaque(config, &format!("spec.config[{index}]"), errors);
    }
}

fn request(request: &Value, at: &str, known: &mut Vec<String>, errors: &mut Vec<FieldError>) {
    let name = text(request, "name");
    names::label(&format!("{at}.name"), name, errors);
    if known.iter().any(|other| other == name) {
        errors.push(FieldError::duplicate(at, request.clone()));
    }
    known.push(name.to_owned());
    match (request["exactly"].is_object(), request["firstAvailable"].is_array()) {
        (true, false) => device_request(&request["exactly"], &format!("{at}.exactly"), errors),
        (false, true) => {
            let at = format!("{at}.firstAvailable");
            for (index, sub) in
                items(&request["firstAvailable"], &at, SUB_REQUESTS, errors).iter().enumerate()
            {
                let at = format!("{at}[{index}]");
                names::label(&format!("{at}.name"), text(sub, "name"), errors);
                known.push(format!("{name}/{}", text(sub, "name")));
                device_request(sub, &at, errors);
            }
        }
        _ => errors.push(FieldError::required(
            at,
            "exactly one of `exactly` or `firstAvailable` is required",
        )),
    }
}

fn device_request(request: &Value, at: &str, errors: &mut Vec<FieldError>) {
    names::subdomain(
        &format!("{at}.deviceClassName"),
        text(request, "deviceClassName"),
        253,
        errors,
    );
    selectors(request, at, errors);
    match text(request, "allocationMode") {
        "ExactCount" if request["count"].as_i64().is_none_or(|count| count < 1) => {
            errors.push(FieldError::invalid(
                format!("{at}.count"),
                request["count"].clone(),
                "must be greater than zero",
            ));
        }
        "All" if request["count"].as_i64().is_some_and(|count| count != 0) => {
            errors.push(FieldError::invalid(
                format!("{at}.count"),
                request["count"].clone(),
                "must not be specified when allocationMode is 'All'",
            ))
        }
        "ExactCount" | "All" => {}
        other => errors.push(FieldError::not_supported(
            format!("{at}.allocationMode"),
            other,
            &["All", "ExactCount"],
        )),
    }
    tolerations(&request["tolerations"], &format!("{at}.tolerations"), errors);
}

fn selectors(parent: &Value, at: &str, errors: &mut Vec<FieldError>) {
    let at = format!("{at}.selectors");
    for (index, selector) in items(&parent["selectors"], &at, SELECTORS, errors).iter().enumerate()
    {
        let at = format!("{at}[{index}].cel.expression");
        let expression = text(&selector["cel"], "expression");
        if expression.is_empty() {
            errors.push(FieldError::invalid(at, "", "compilation failed: the expression is empty"));
        } else if expression.len() > EXPRESSION_BYTES {
            errors.push(FieldError::too_long(at, EXPRESSION_BYTES));
        }
    }
}

fn tolerations(list: &Value, at: &str, errors: &mut Vec<FieldError>) {
    for (index, toleration) in items(list, at, TOLERATIONS, errors).iter().enumerate() {
        let at = format!("{at}[{index}]");
        match text(toleration, "operator") {
            "Exists" if !text(toleration, "value").is_empty() => errors.push(FieldError::invalid(
                format!("{at}.value"),
                text(toleration, "value"),
                "must be empty for operator `Exists`",
            )),
            "Exists" | "Equal" => {}
            other => errors.push(FieldError::not_supported(
                format!("{at}.operator"),
                other,
                &["Equal", "Exists"],
            )),
        }
        if !["", "None", "NoSchedule", "NoExecute"].contains(&text(toleration, "effect")) {
            let effect = text(toleration, "effect");
            errors.push(FieldError::not_supported(
                format!("{at}.effect"),
                effect,
                &["NoExecute", "NoSchedule", "None"],
            ));
        }
    }
}

fn references(item: &Value, at: &str, known: &[String], errors: &mut Vec<FieldError>) {
    for (index, name) in item["requests"].as_array().into_iter().flatten().enumerate() {
        if !known.iter().any(|known| Some(known.as_str()) == name.as_str()) {
            let at = format!("{at}.requests[{index}]");
            errors.push(FieldError::invalid(
                at,
                name.clone(),
                "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'",
            ));
        }
    }
}

fn attribute_name(at: &str, name: &str, errors: &mut Vec<FieldError>) {
    if name.contains('/') {
        names::qualified(at, name, errors);
    } else {
        let rule = "a fully qualified name must be a domain and a name separated by a slash";
        errors.push(FieldError::invalid(at, name, rule));
    }
}

fn opaque(config: &Value, at: &str, errors: &mut Vec<FieldError>) {
    let at = format!("{at}.opaque");
    let opaque = &config["opaque"];
    if !opaque.is_object() {
        errors.push(FieldError::required(at, ""));
        return;
    }
    names::driver(&format!("{at}.driver"), text(opaque, "driver"), errors);
    let parameters = &opaque["parameters"];
    if parameters.is_null() {
        errors.push(FieldError::required(format!("{at}.parameters"), ""));
    } else if !parameters.is_object() {
        errors.push(FieldError::invalid(
            format!("{at}.parameters"),
            "<value omitted>",
            "must be a valid JSON object",
        ));
    } else if parameters.to_string().len() > PARAMETERS_BYTES {
        errors.push(FieldError::too_long(format!("{at}.parameters"), PARAMETERS_BYTES));
    }
}

/// Returns true if the claim or template requests admin access, which needs a labelled namespace.
pub(crate) fn needs_admin_namespace(spec: &Value) -> bool {
    let requests = spec["devices"]["requests"].as_array();
    requests.into_iter().flatten().any(|request| request["exactly"]["adminAccess"] == true)
}

pub(super) fn status(claim: &Value, current: &Value, errors: &mut Vec<FieldError>) {
    let (new, old) = (&claim["status"], &current["status"]);
    let allocation = &new["allocation"];
    if allocation.is_object() && old["allocation"].is_object() {
        if allocation != &old["allocation"] {
            let field = "status.allocation";
            errors.push(FieldError::invalid(
                field,
                Value::Null,
                "field cannot be modified once set",
            ));
        }
    } else if allocation.is_object() {
        self::allocation(allocation, &claim["spec"], errors);
    }
    reserved_for(claim, current, errors);
    for (index, device) in new["devices"].as_array().into_iter().flatten().enumerate() {
        let same = |result: &Value| {
            ["driver", "pool", "device", "shareID"].iter().all(|f| result[f] == device[f])
        };
        if !allocation["devices"]["results"]
            .as_array()
            .is_some_and(|results| results.iter().any(same))
        {
            let at = format!("status.devices[{index}]");
            errors.push(FieldError::invalid(
                at,
                device["device"].clone(),
                "must be an allocated device in the claim",
            ));
        }
    }
}

fn allocation(allocation: &Value, spec: &Value, errors: &mut Vec<FieldError>) {
    let known = request_names(spec);
    let at = "status.allocation.devices.results";
    for (index, result) in
        items(&allocation["devices"]["results"], at, RESULTS, errors).iter().enumerate()
    {
        let at = format!("{at}[{index}]");
        let request = text(result, "request");
        if !known.iter().any(|known| known == request) {
            errors.push(FieldError::invalid(
                format!("{at}.request"),
                request,
                "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'",
            ));
        }
        names::driver(&format!("{at}.driver"), text(result, "driver"), errors);
        pool_name(&format!("{at}.pool"), text(result, "pool"), errors);
        names::label(&format!("{at}.device"), text(result, "device"), errors);
        share_id(result, &at, errors);
        tolerations(&result["tolerations"], &format!("{at}.tolerations"), errors);
    }
    let at = "status.allocation.devices.config";
    for (index, config) in
        items(&allocation["devices"]["config"], at, ALLOCATED_CONFIG, errors).iter().enumerate()
    {
        let at = format!("{at}[{index}]");
        let source = text(config, "source");
        if !["FromClass", "FromClaim"].contains(&source) {
            errors.push(FieldError::not_supported(
                format!("{at}.source"),
                source,
                &["FromClaim", "FromClass"],
            ));
        }
        references(config, &at, &known, errors);
        opaque(config, &at, errors);
    }
    let selector = &allocation["nodeSelector"];
    if selector.is_object() && selector["nodeSelectorTerms"].as_array().is_none_or(Vec::is_empty) {
        let at = "status.allocation.nodeSelector.nodeSelectorTerms";
        errors.push(FieldError::required(at, "must have at least one node selector term"));
    }
}

fn share_id(result: &Value, at: &str, errors: &mut Vec<FieldError>) {
    let Some(id) = result["shareID"].as_str() else { return };
    let canonical =
        uuid::Uuid::try_parse(id).is_ok_and(|parsed| parsed.hyphenated().to_string() == id);
    if !canonical {
        let rule = "must be a lowercase UUID in 8-4-4-4-12 format";
        errors.push(FieldError::invalid(format!("{at}.shareID"), id, rule));
    }
}

/// Checks for DNS subdomains joined by slashes.
pub(super) fn pool_name(at: &str, name: &str, errors: &mut Vec<FieldError>) {
    if name.is_empty() {
        errors.push(FieldError::required(at, ""));
    } else if name.len() > 253 {
        errors.push(FieldError::too_long(at, 253));
    } else {
        name.split('/').for_each(|part| names::subdomain(at, part, 253, errors));
    }
}

fn request_names(spec: &Value) -> Vec<String> {
    let mut known = Vec::new();
    for request in spec["devices"]["requests"].as_array().into_iter().flatten() {
        let name = text(request, "name");
        known.push(name.to_owned());
        for sub in request["firstAvailable"].as_array().into_iter().flatten() {
            known.push(format!("{name}/{}", text(sub, "name")));
        }
    }
    known
}

fn reserved_for(claim: &Value, current: &Value, errors: &mut Vec<FieldError>) {
    let at = "status.reservedFor";
    let consumers = items(&claim["status"]["reservedFor"], at, RESERVED_FOR, errors);
    let before = current["status"]["reservedFor"].as_array().map(Vec::as_slice).unwrap_or_default();
    for (index, consumer) in consumers.iter().enumerate() {
        for field in ["resource", "name", "uid"] {
            if text(consumer, field).is_empty() {
                errors.push(FieldError::required(format!("{at}[{index}].{field}"), ""));
            }
        }
        if consumers[..index].iter().any(|other| other["uid"] == consumer["uid"]) {
            errors.push(FieldError::duplicate(format!("{at}[{index}]"), consumer.clone()));
        }
    }
    if consumers.is_empty() {
        return;
    }
    if claim["status"]["allocation"].is_null() {
        errors.push(FieldError::forbidden(at, "may not be specified when `allocated` is not set"));
    }
    let added = consumers
        .iter()
        .any(|consumer| !before.iter().any(|known| known["uid"] == consumer["uid"]));
    if added && meta::is_deleting(current) {
        errors.push(FieldError::forbidden(
            at,
            "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set",
        ));
    }
}

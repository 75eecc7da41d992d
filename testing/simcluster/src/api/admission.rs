//! Admission policies of the chart, evaluated by their own CEL expressions.
//!
//! ```text
//! golden/default.yaml (what helm renders) -- parse once --> policies: rules, conditions, variables, validations
//! request (object, oldObject, user) -- evaluate --> allowed, or denied with the policy's message
//! ```

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use anyhow::Context as _;
use cel::{Context, Env, Program, extensions};
use k8s_openapi::api::admissionregistration::v1::{
    NamedRuleWithOperations, ValidatingAdmissionPolicy,
};
use serde_json::{Value, json};

use super::error::ApiError;
use super::kind::Kind;
use super::meta;
use super::user::User;

/// The chart as helm renders it with its default values; `deploy/chart/check.sh` keeps it current.
const MANIFESTS: &str = include_str!("../../../../deploy/chart/golden/default.yaml");

/// The chart's policies with compiled expressions.
static CHART: LazyLock<Vec<Policy>> =
    LazyLock::new(|| parse(MANIFESTS).expect("invariant: the chart's policies are valid"));

/// The environment in which expressions are compiled and evaluated.
static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| {
    let mut env = Env::stdlib().with_optional_support(true);
    env.add_extension(extensions::strings).expect("invariant: the extension is added once");
    Arc::new(env)
});

/// Selects the admission policies in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policies {
    is_enabled: bool,
}

impl Policies {
    /// Returns no policies, as on a cluster without the chart.
    pub const fn none() -> Self {
        Self { is_enabled: false }
    }

    /// Returns all policies, as on a cluster with the chart.
    pub const fn all() -> Self {
        Self { is_enabled: true }
    }

    /// Evaluates the policies that match the request.
    ///
    /// # Errors
    /// Returns 403 with the message of the first policy that denies the request.
    pub(crate) fn admit(&self, attempt: &Attempt<'_>) -> Result<(), ApiError> {
        if !self.is_enabled {
            return Ok(());
        }
        for policy in CHART.iter().filter(|policy| policy.matches(attempt)) {
            if let Err(message) = policy.evaluate(attempt) {
                let name = attempt.object.or(attempt.current).map(meta::name).unwrap_or_default();
                return Err(ApiError::denied_by_policy(attempt.kind, name, &policy.name, &message));
            }
        }
        Ok(())
    }
}

/// A write request to be admitted.
pub(crate) struct Attempt<'a> {
    pub(crate) kind: &'static Kind,
    pub(crate) status: bool,
    pub(crate) user: &'a User,
    /// The object to be stored; `None` for a deletion.
    pub(crate) object: Option<&'a Value>,
    /// The stored object; `None` for a creation.
    pub(crate) current: Option<&'a Value>,
}

impl Attempt<'_> {
    fn operation(&self) -> &'static str {
        match (self.object, self.current) {
            (None, _) => "DELETE",
            (_, None) => "CREATE",
            _ => "UPDATE",
        }
    }

    /// Returns the resource with its subresource, as policies name it.
    fn resource(&self) -> String {
        let plural = self.kind.plural;
        if self.status { format!("{plural}/status") } else { plural.to_owned() }
    }

    /// Returns the context of expressions: `object`, `oldObject` and `request`.
    fn context(&self) -> Result<Context<'static, 'static>, String> {
        let request = json!({
            "operation": self.operation(),
            "kind": {"kind": self.kind.kind},
            "userInfo": {"username": self.user.name, "extra": self.user.extra},
        });
        let mut context = Context::with_env(Arc::clone(&ENVIRONMENT));
        let values = [
            ("object", self.object.map(without_nulls).unwrap_or_default()),
            ("oldObject", self.current.map(without_nulls).unwrap_or_default()),
            ("request", request),
        ];
        for (name, value) in values {
            let value = cel::to_value(value).map_err(|error| error.to_string())?;
            context.add_variable_from_value(name, value);
        }
        Ok(context)
    }
}

/// Returns the value without null fields, which typed objects of the API server do not have.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (name.clone(), without_nulls(value)))
            .collect::<serde_json::Map<_, _>>()
            .into(),
        Value::Array(values) => values.iter().map(without_nulls).collect(),
        other => other.clone(),
    }
}

/// An expression with its source, for errors.
struct Expression {
    source: String,
    program: Program,
}

impl Expression {
    fn compile(source: &str) -> anyhow::Result<Self> {
        let program =
            ENVIRONMENT.compile(source).with_context(|| format!("cannot compile `{source}`"))?;
        Ok(Self { source: source.to_owned(), program })
    }

    fn evaluate(&self, context: &Context<'_, '_>) -> Result<cel::Value, String> {
        let failed = |error| format!("expression '{}' resulted in error: {error}", self.source);
        self.program.execute(context).map_err(failed)
    }

    fn is_true(&self, context: &Context<'_, '_>) -> Result<bool, String> {
        Ok(self.evaluate(context)? == cel::Value::Bool(true))
    }
}

/// One ValidatingAdmissionPolicy. A failed evaluation denies the request (`failurePolicy: Fail`).
struct Policy {
    name: String,
    rules: Vec<NamedRuleWithOperations>,
    conditions: Vec<Expression>,
    variables: Vec<(String, Expression)>,
    validations: Vec<(Expression, String)>,
}

impl Policy {
    fn compile(policy: ValidatingAdmissionPolicy) -> anyhow::Result<Self> {
        let spec = policy.spec.context("no spec")?;
        let conditions = spec.match_conditions.into_iter().flatten();
        let variables = spec.variables.into_iter().flatten();
        let validations = spec.validations.into_iter().flatten();
        Ok(Self {
            name: policy.metadata.name.context("no name")?,
            rules: spec.match_constraints.and_then(|all| all.resource_rules).unwrap_or_default(),
            conditions: conditions
                .map(|condition| Expression::compile(&condition.expression))
                .collect::<anyhow::Result<_>>()?,
            variables: variables
                .map(|variable| Ok((variable.name, Expression::compile(&variable.expression)?)))
                .collect::<anyhow::Result<_>>()?,
            validations: validations
                .map(|validation| {
                    let message = validation.message.unwrap_or_default();
                    Ok((Expression::compile(&validation.expression)?, message))
                })
                .collect::<anyhow::Result<_>>()?,
        })
    }

    fn matches(&self, attempt: &Attempt<'_>) -> bool {
        let has = |list: &Option<Vec<String>>, value: &str| {
            list.iter().flatten().any(|entry| entry == value)
        };
        self.rules.iter().any(|rule| {
            has(&rule.api_groups, attempt.kind.group)
                && has(&rule.operations, attempt.operation())
                && has(&rule.resources, &attempt.resource())
        })
    }

    /// Returns the message of the first validation that fails.
    fn evaluate(&self, attempt: &Attempt<'_>) -> Result<(), String> {
        let mut context = attempt.context()?;
        for condition in &self.conditions {
            if !condition.is_true(&context)? {
                return Ok(());
            }
        }
        let mut variables = HashMap::new();
        for (name, expression) in &self.variables {
            variables.insert(name.clone(), expression.evaluate(&context)?);
            context.add_variable_from_value("variables", variables.clone());
        }
        for (validation, message) in &self.validations {
            if !validation.is_true(&context)? {
                return Err(message.clone());
            }
        }
        Ok(())
    }
}

/// Returns the policies in a multi-document manifest.
fn parse(manifests: &str) -> anyhow::Result<Vec<Policy>> {
    let mut policies = Vec::new();
    for document in manifests.split("\n---\n") {
        let object: Value = serde_saphyr::from_str(document)?;
        if object["kind"] == "ValidatingAdmissionPolicy" {
            policies.push(Policy::compile(serde_json::from_value(object)?)?);
        }
    }
    Ok(policies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::kind;

    /// Admits the creation of an object by the administrator.
    fn create(group: &str, plural: &str, object: &Value) -> Result<(), String> {
        let kind = kind::find(group, "v1", plural).unwrap();
        let user = User::admin();
        let attempt =
            Attempt { kind, status: false, user: &user, object: Some(object), current: None };
        Policies::all().admit(&attempt).map_err(|error| error.message)
    }

    fn container(mounts: &[&str]) -> Value {
        let mounts: Vec<Value> =
            mounts.iter().map(|path| json!({"name": "v", "mountPath": path})).collect();
        json!({"name": "c", "volumeMounts": mounts})
    }

    fn pod(containers: &[Value]) -> Value {
        let claims = json!([{"name": "gpu", "resourceClaimName": "c"}]);
        json!({
            "metadata": {"name": "p"},
            "spec": {"containers": containers, "resourceClaims": claims, "volumes": null},
        })
    }

    #[test]
    fn compiles_every_policy_of_the_chart() {
        let names: Vec<&str> = CHART.iter().map(|policy| policy.name.as_str()).collect();
        let expected = [
            "allocation",
            "controller",
            "nomination",
            "templates",
            "finalizer",
            "fence",
            "slices",
            "resizes",
            "mounts",
        ];
        assert_eq!(names, expected.map(|name| format!("tessera-{name}")));
    }

    #[test]
    fn denies_reserved_names_of_templates() {
        let write = |field: &str, name: &str| {
            let template = json!({"metadata": {field: name}, "spec": {"spec": {}}});
            create("resource.k8s.io", "resourceclaimtemplates", &template)
        };
        for (field, name) in [("name", "tessera.hami.00"), ("generateName", "tessera.")] {
            let denied = write(field, name).unwrap_err();
            assert!(denied.contains("are those of converted pods"), "{denied}");
        }
        assert_eq!(write("name", "quarter"), Ok(()));
        assert_eq!(write("name", "tessera-quarter"), Ok(()));
    }

    #[test]
    fn denies_mounts_at_above_and_under_grants() {
        for path in ["/dev/tessera", "/dev/tessera/x", "/dev/", "/", "//dev/./tessera", "./dev"] {
            let denied = create("", "pods", &pod(&[container(&["/data", path])])).unwrap_err();
            assert!(denied.contains("at, above or under /dev/tessera"), "{path}: {denied}");
        }
        let denied = create("", "pods", &pod(&[container(&["/tmp/../dev"])])).unwrap_err();
        assert!(denied.contains("must not use .."), "{denied}");
        for path in ["/dev/shm", "/dev/tessera2", "/data/dev/tessera"] {
            assert_eq!(create("", "pods", &pod(&[container(&[path])])), Ok(()), "{path}");
        }
        let mut unclaimed = pod(&[container(&["/dev"])]);
        unclaimed["spec"]["resourceClaims"] = Value::Null;
        assert_eq!(create("", "pods", &unclaimed), Ok(()));
        let limits = json!({"deviceclass.resource.kubernetes.io/gpu.tessera.dev": "1"});
        unclaimed["spec"]["containers"][0]["resources"] = json!({"limits": limits});
        assert!(create("", "pods", &unclaimed).is_err(), "kube-scheduler makes a claim of it");
    }

    #[test]
    fn evaluates_pod_with_4000_mounts() {
        let mut containers = vec![container(&["/data"; 40]); 100];
        assert_eq!(create("", "pods", &pod(&containers)), Ok(()));
        containers[99]["volumeMounts"][39]["mountPath"] = "/dev/tessera".into();
        assert!(create("", "pods", &pod(&containers)).is_err());
    }

    #[test]
    fn evaluates_tolerations_of_every_alternative() {
        let toleration = |key: &str| json!({"key": key, "operator": "Exists"});
        let alternative = json!({"name": "a", "tolerations": vec![toleration("other"); 16]});
        let request = json!({"name": "r", "firstAvailable": vec![alternative; 8]});
        let mut claim = json!({
            "metadata": {"name": "c"}, "spec": {"devices": {"requests": vec![request; 32]}},
        });
        let group = "resource.k8s.io";
        assert_eq!(create(group, "resourceclaims", &claim), Ok(()));
        claim["spec"]["devices"]["requests"][31]["firstAvailable"][7]["tolerations"][15] =
            toleration("gpu.tessera.dev/managed");
        let denied = create(group, "resourceclaims", &claim).unwrap_err();
        assert!(denied.contains("must not tolerate"), "{denied}");
        let template = json!({"metadata": {"name": "t"}, "spec": {"spec": claim["spec"]}});
        assert!(create(group, "resourceclaimtemplates", &template).is_err());
    }

    #[test]
    fn bounds_number_and_names_of_slices_of_a_node() {
        let kind = kind::find("resource.k8s.io", "v1", "resourceslices").unwrap();
        let write = |node: &str, name: &str, count: u64| {
            let driver = User::service_account("tessera-system", "tessera-driver").on_node(node);
            let pool = json!({"name": node, "generation": 1, "resourceSliceCount": count});
            let slice = json!({
                "metadata": {"name": name},
                "spec": {"driver": "gpu.tessera.dev", "nodeName": node, "pool": pool},
            });
            let (object, current) = (Some(&slice), None);
            let attempt = Attempt { kind, status: false, user: &driver, object, current };
            Policies::all().admit(&attempt).is_ok()
        };
        let long = "n".repeat(253);
        // The driver cuts names that are too long, and appends a hash.
        let cut = format!("000-gpu.tessera.dev-{}-0123456789ab", &long[..220]);
        for (node, name) in [("n", "000-gpu.tessera.dev-n"), (&long, &cut)] {
            assert!(write(node, name, 1), "{name}");
            assert!(!write(node, name, 9), "{name}");
        }
        assert!(write("n", "007-gpu.tessera.dev-n", 8));
        for name in
            ["008-gpu.tessera.dev-n", "000-gpu.tessera.dev-m", "x", "000-gpu.tessera.dev-n-0"]
        {
            assert!(!write("n", name, 1), "{name}");
        }
    }

    #[test]
    fn allows_update_of_slice_without_change_of_content() {
        let kind = kind::find("resource.k8s.io", "v1", "resourceslices").unwrap();
        let slice = |generation: u64, owners: Value| {
            let pool = json!({"name": "n", "generation": generation, "resourceSliceCount": 1});
            json!({
                "metadata": {"name": "s", "ownerReferences": owners},
                "spec": {"driver": "gpu.tessera.dev", "nodeName": "n", "pool": pool},
            })
        };
        let user = User::admin();
        let current = slice(1, json!([{"kind": "Node", "name": "n"}]));
        let update = |object: &Value| {
            let (object, current) = (Some(object), Some(&current));
            let attempt = Attempt { kind, status: false, user: &user, object, current };
            Policies::all().admit(&attempt).map_err(|error| error.message)
        };
        assert_eq!(update(&slice(1, Value::Null)), Ok(()));
        let denied = update(&slice(2, Value::Null)).unwrap_err();
        assert!(denied.contains("only tessera-driver publishes"), "{denied}");
    }
}

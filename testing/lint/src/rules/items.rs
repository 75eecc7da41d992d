//! Rules about items of Rust: doc comments, names, lengths.

use std::collections::BTreeMap;

use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};

use super::{Finding, Rule};

/// Characters of a test's name; `docs/contributing/style.md` asks for 60.
pub(super) const LONGEST_TEST_NAME: usize = 70;

/// Lines of a function, from its signature to its closing brace.
pub(super) const LONGEST_FUNCTION: usize = 100;

/// Lines of a file of a shipped crate.
pub(super) const LONGEST_FILE: usize = 600;

/// First words that make the first sentence of a doc comment a noun clause.
const NOUN_CLAUSES: &[&str] = &[
    "what", "whatever", "whether", "who", "whoever", "whom", "whose", "where", "wherever", "which",
    "why", "when", "how", "that", "those", "so many", "so much", "as many", "as much", "the same",
];

/// Public types of these names need the module beside them to be understood.
const VAGUE_TYPES: &[&str] = &[
    "Of", "At", "In", "Out", "Why", "Way", "What", "Then", "Said", "See", "Thing", "Stuff", "Data",
    "Info", "Manager", "Helper",
];

/// Directories of crates that do not ship.
const NOT_SHIPPED: &[&str] = &["testing/", "e2e/"];

/// Public types of shipped crates: name to crate to the first declaration.
#[derive(Debug, Default)]
pub(super) struct PublicTypes(BTreeMap<String, BTreeMap<String, (String, usize)>>);

impl PublicTypes {
    /// Reports each declaration of a name that another shipped crate declares as well.
    pub(super) fn report(self, findings: &mut Vec<Finding>) {
        for (name, crates) in self.0 {
            if crates.len() < 2 {
                continue;
            }
            let all = crates.keys().cloned().collect::<Vec<_>>().join(", ");
            findings.extend(crates.into_values().map(|(path, line)| Finding {
                rule: Rule::AmbiguousType,
                path,
                line,
                message: format!("public type `{name}` is declared in {all}: qualify the names"),
            }));
        }
    }
}

/// Returns the noun clause that a sentence begins with.
pub(super) fn noun_clause(sentence: &str) -> Option<&'static str> {
    let plain = sentence.trim().to_lowercase();
    let is_clause = |clause: &&&str| {
        plain.strip_prefix(**clause).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
    };
    NOUN_CLAUSES.iter().find(is_clause).copied()
}

/// Checks one parsed file.
pub(super) fn check(
    path: &str,
    text: &str,
    file: &syn::File,
    types: &mut PublicTypes,
    findings: &mut Vec<Finding>,
) {
    let is_shipped = !NOT_SHIPPED.iter().any(|directory| path.starts_with(directory));
    let is_product = is_shipped && path.contains("/src/") && !is_test_file(path);
    let lines = text.lines().count();
    if is_product && lines > LONGEST_FILE {
        findings.push(Finding {
            rule: Rule::FileLength,
            path: path.to_owned(),
            line: 1,
            message: format!("{lines} lines; split it, at most {LONGEST_FILE}"),
        });
    }
    let mut visitor = Visitor { path, is_product, types, findings };
    visitor.visit_file(file);
}

fn is_test_file(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.contains("/tests/") || path.contains("/benches/")
}

struct Visitor<'a> {
    path: &'a str,
    is_product: bool,
    types: &'a mut PublicTypes,
    findings: &'a mut Vec<Finding>,
}

impl Visitor<'_> {
    fn report(&mut self, rule: Rule, line: usize, message: String) {
        self.findings.push(Finding { rule, path: self.path.to_owned(), line, message });
    }

    /// Checks the first sentence of a doc comment, if `attribute` is its first line.
    fn doc(&mut self, attribute: &syn::Attribute) {
        let Some((line, first)) = doc_line(attribute) else { return };
        if let Some(clause) = noun_clause(&first) {
            let message =
                format!("begins with `{clause}`; say what it is or does: {}", first.trim());
            self.report(Rule::DocSentence, line, message);
        }
    }

    fn public_type(&mut self, visibility: &syn::Visibility, name: &syn::Ident) {
        if !self.is_product || !matches!(visibility, syn::Visibility::Public(_)) {
            return;
        }
        let line = name.span().start().line;
        let name = name.to_string();
        if VAGUE_TYPES.contains(&name.as_str()) {
            self.report(
                Rule::VagueType,
                line,
                format!("public type `{name}` needs a noun of the domain"),
            );
        }
        let crates = self.types.0.entry(name).or_default();
        crates.entry(crate_of(self.path)).or_insert_with(|| (self.path.to_owned(), line));
    }

    fn function(&mut self, attributes: &[syn::Attribute], signature: &syn::Signature, end: usize) {
        let name = signature.ident.to_string();
        let line = signature.ident.span().start().line;
        let is_test = attributes.iter().any(is_test_attribute);
        let length = name.chars().count();
        if is_test && length > LONGEST_TEST_NAME {
            let message = format!("`{name}` has {length} characters; at most {LONGEST_TEST_NAME}");
            self.report(Rule::TestName, line, message);
        }
        let is_predicate = ["is_", "has_", "can_"].iter().any(|prefix| name.starts_with(prefix));
        if is_predicate && takes_mut_self(signature) {
            let message = format!("`{name}` takes `&mut self`: a question must not change state");
            self.report(Rule::Predicate, line, message);
        }
        let lines = (end + 1).saturating_sub(signature.span().start().line);
        if lines > LONGEST_FUNCTION {
            let message = format!("`{name}` has {lines} lines; at most {LONGEST_FUNCTION}");
            self.report(Rule::FunctionLength, line, message);
        }
    }
}

impl<'ast> Visit<'ast> for Visitor<'_> {
    fn visit_file(&mut self, file: &'ast syn::File) {
        first_doc_line(&file.attrs).into_iter().for_each(|line| self.doc(line));
        visit::visit_file(self, file);
    }

    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Const(item) => &item.attrs,
            syn::Item::Enum(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Macro(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Static(item) => &item.attrs,
            syn::Item::Struct(item) => &item.attrs,
            syn::Item::Trait(item) => &item.attrs,
            syn::Item::Type(item) => &item.attrs,
            syn::Item::Union(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        first_doc_line(attributes).into_iter().for_each(|line| self.doc(line));
        visit::visit_item(self, item);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        first_doc_line(&field.attrs).into_iter().for_each(|line| self.doc(line));
        visit::visit_field(self, field);
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        first_doc_line(&variant.attrs).into_iter().for_each(|line| self.doc(line));
        visit::visit_variant(self, variant);
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        let attributes = match item {
            syn::ImplItem::Const(item) => &item.attrs,
            syn::ImplItem::Fn(item) => &item.attrs,
            syn::ImplItem::Type(item) => &item.attrs,
            _ => return visit::visit_impl_item(self, item),
        };
        first_doc_line(attributes).into_iter().for_each(|line| self.doc(line));
        visit::visit_impl_item(self, item);
    }

    fn visit_trait_item(&mut self, item: &'ast syn::TraitItem) {
        let attributes = match item {
            syn::TraitItem::Const(item) => &item.attrs,
            syn::TraitItem::Fn(item) => &item.attrs,
            syn::TraitItem::Type(item) => &item.attrs,
            _ => return visit::visit_trait_item(self, item),
        };
        first_doc_line(attributes).into_iter().for_each(|line| self.doc(line));
        visit::visit_trait_item(self, item);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.function(&item.attrs, &item.sig, item.block.span().end().line);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.attrs, &item.sig, item.block.span().end().line);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        let end = item.default.as_ref().map_or(0, |block| block.span().end().line);
        self.function(&item.attrs, &item.sig, end);
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.public_type(&item.vis, &item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.public_type(&item.vis, &item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.public_type(&item.vis, &item.ident);
        visit::visit_item_trait(self, item);
    }
}

fn first_doc_line(attributes: &[syn::Attribute]) -> Option<&syn::Attribute> {
    attributes.iter().find(|attribute| doc_line(attribute).is_some())
}

/// Returns the line and text of an attribute that is a line of a doc comment with words in it.
fn doc_line(attribute: &syn::Attribute) -> Option<(usize, String)> {
    let syn::Meta::NameValue(pair) = &attribute.meta else { return None };
    let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = &pair.value else {
        return None;
    };
    (pair.path.is_ident("doc") && !text.value().trim().is_empty())
        .then(|| (text.span().start().line, text.value()))
}

fn is_test_attribute(attribute: &syn::Attribute) -> bool {
    attribute.path().segments.last().is_some_and(|segment| segment.ident == "test")
}

fn takes_mut_self(signature: &syn::Signature) -> bool {
    matches!(signature.inputs.first(), Some(syn::FnArg::Receiver(receiver))
        if receiver.mutability.is_some() && receiver.reference.is_some())
}

/// Returns the directory of the crate that has a file.
fn crate_of(path: &str) -> String {
    path.split_once("/src/").map_or(path, |(directory, _)| directory).to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn rules_of(path: &str, text: &str) -> BTreeSet<&'static str> {
        let mut findings = Vec::new();
        let mut types = PublicTypes::default();
        check(path, text, &syn::parse_file(text).unwrap(), &mut types, &mut findings);
        findings.iter().map(|finding| finding.rule.name()).collect()
    }

    #[test]
    fn noun_clause_is_reported_wherever_a_doc_comment_is() {
        let clause = BTreeSet::from(["doc-sentence"]);
        for text in [
            "//! What it is.\n",
            "/// Whether it is.\nfn f() {}\n",
            "struct S {\n    /// Who it is.\n    field: u8,\n}\n",
            "enum E {\n    /// The same, later.\n    Variant,\n}\n",
            "impl S {\n    /// So many.\n    fn f() {}\n}\n",
            "trait T {\n    /// Why.\n    fn f();\n}\n",
        ] {
            assert_eq!(rules_of("a/src/b.rs", text), clause, "{text}");
        }
        let later_line = "/// Whatsoever.\n/// What.\nfn f() {}\n";
        assert_eq!(rules_of("a/src/b.rs", later_line), BTreeSet::new());
    }

    #[test]
    fn predicate_that_mutates_is_reported() {
        let predicate = BTreeSet::from(["predicate"]);
        let of = |method: &str| rules_of("a/src/b.rs", &format!("impl S {{ {method} }}"));
        assert_eq!(of("fn is_open(&mut self) -> bool { true }"), predicate);
        assert_eq!(of("fn is_open(&self) -> bool { true }"), BTreeSet::new());
        assert_eq!(of("fn open(&mut self) {}"), BTreeSet::new());
    }

    #[test]
    fn long_names_functions_and_files_are_reported() {
        let name = "a".repeat(LONGEST_TEST_NAME + 1);
        let text = format!("#[tokio::test]\nasync fn {name}() {{}}\n");
        assert_eq!(rules_of("a/src/b.rs", &text), BTreeSet::from(["test-name"]));
        let long = format!("fn f() {{\n{}}}\n", "    g();\n".repeat(LONGEST_FUNCTION));
        assert_eq!(rules_of("a/src/b.rs", &long), BTreeSet::from(["function-length"]));
        let file = "const A: u8 = 1;\n".repeat(LONGEST_FILE + 1);
        assert_eq!(rules_of("a/src/b.rs", &file), BTreeSet::from(["file-length"]));
        assert_eq!(rules_of("a/src/tests.rs", &file), BTreeSet::new());
    }

    #[test]
    fn public_types_are_unique_across_shipped_crates() {
        let mut findings = Vec::new();
        let mut types = PublicTypes::default();
        let text = "pub struct Node;\nstruct Hidden;\n";
        for path in ["a/src/x.rs", "b/src/y.rs", "testing/c/src/z.rs"] {
            check(path, text, &syn::parse_file(text).unwrap(), &mut types, &mut findings);
        }
        types.report(&mut findings);
        let places: Vec<&str> = findings.iter().map(|finding| finding.path.as_str()).collect();
        assert_eq!(places, ["a/src/x.rs", "b/src/y.rs"]);
        assert!(rules_of("a/src/b.rs", "pub enum What {}").contains("vague-type"));
    }
}

//! The layouts of grant and ledger for C: `include/tessera_intercept.h`, written from the sources
//! and held to what the compiler makes of them; `UPDATE=1` writes it anew. What a C program reads
//! with it is what Rust has written.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

use tessera_intercept_abi::{
    ABI_VERSION, ComputePolicy, GRANT_LEN, Grant, GrantPage, LEDGER_LEN, LedgerPage, SlotPage,
    Text, ledger,
};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const SOURCES: [&str; 4] = ["lib.rs", "grant.rs", "compute.rs", "ledger.rs"];
/// Constants that C programs need.
const CONSTANTS: [&str; 10] = [
    "ABI_VERSION",
    "GRANT_OVERSUBSCRIBE",
    "GRANT_MPS",
    "GRANT_LEN",
    "LEDGER_LEN",
    "SLOTS",
    "SLOT_LEN",
    "HEADER_LEN",
    "LOCK_OFFSET",
    "SLOT_LIVE",
];

/// A structure of the sources.
struct Structure {
    name: String,
    doc: Vec<String>,
    fields: Vec<Field>,
}

struct Field {
    doc: Vec<String>,
    /// Reserved ones are named by C as well: a structure has no holes.
    name: String,
    kind: String,
}

/// Declarations in the sources.
#[derive(Default)]
struct Sources {
    structures: Vec<Structure>,
    /// Expressions, by name.
    constants: BTreeMap<String, String>,
}

impl Sources {
    fn read() -> Self {
        let mut read = Self::default();
        for file in SOURCES {
            let text =
                fs::read_to_string(Path::new(CRATE).join("src").join(file)).expect("a source file");
            read.add(&text);
        }
        read
    }

    fn add(&mut self, text: &str) {
        let (mut doc, mut repr_c) = (Vec::new(), false);
        let mut lines = text.lines().map(str::trim);
        while let Some(line) = lines.next() {
            if let Some(text) = line.strip_prefix("///") {
                doc.push(text.trim_start().to_owned());
            } else if line.starts_with("#[repr(C") {
                repr_c = true;
            } else if !line.starts_with("#[") {
                if let Some((name, rest)) = constant(line) {
                    let mut value = rest.to_owned();
                    while !value.ends_with(';') {
                        value.push_str(lines.next().expect("a constant ends"));
                    }
                    self.constants.insert(name.to_owned(), value.trim_end_matches(';').to_owned());
                } else if let (true, Some(name)) = (repr_c, line.strip_prefix("pub struct ")) {
                    let name = name.trim_end_matches(" {").to_owned();
                    let body: Vec<_> = lines.by_ref().take_while(|line| *line != "}").collect();
                    self.structures.push(Structure {
                        name,
                        doc: doc.clone(),
                        fields: fields(&body),
                    });
                }
                doc.clear();
                repr_c = false;
            }
        }
    }

    /// The value of an expression of numbers, constants, sizes, and the four operations.
    fn value(&self, text: &str) -> u64 {
        let mut rest = text.trim();
        let value = self.sum(&mut rest);
        assert!(rest.trim().is_empty(), "`{text}` is not understood at `{rest}`");
        value
    }

    fn sum(&self, rest: &mut &str) -> u64 {
        let mut value = self.product(rest);
        loop {
            match operator(rest, &["+", "-"]) {
                Some("+") => value += self.product(rest),
                Some(_) => value -= self.product(rest),
                None => return value,
            }
        }
    }

    fn product(&self, rest: &mut &str) -> u64 {
        let mut value = self.atom(rest);
        loop {
            match operator(rest, &["*", "/", "<<"]) {
                Some("*") => value *= self.atom(rest),
                Some("/") => value /= self.atom(rest),
                Some(_) => value <<= self.atom(rest),
                None => return value,
            }
        }
    }

    fn atom(&self, rest: &mut &str) -> u64 {
        if operator(rest, &["("]).is_some() {
            let value = self.sum(rest);
            assert!(operator(rest, &[")"]).is_some(), "a bracket is closed before `{rest}`");
            return value;
        }
        *rest = rest.trim_start();
        if let Some((name, after)) =
            rest.strip_prefix("size_of::<").and_then(|rest| rest.split_once(">()"))
        {
            *rest = after;
            return self.size(name);
        }
        let end =
            rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        *rest = after;
        let word = word.rsplit("::").next().expect("split gives one");
        match word.replace('_', "").parse() {
            Ok(number) => number,
            Err(_) => self.value(
                self.constants.get(word).unwrap_or_else(|| panic!("`{word}` is no constant")),
            ),
        }
    }

    fn size(&self, kind: &str) -> u64 {
        if let Some((element, count)) = array(kind) {
            return self.size(element) * self.value(count);
        }
        match kind {
            "u8" => 1,
            "u32" | "AtomicU32" => 4,
            "u64" | "AtomicU64" | "AtomicI64" => 8,
            _ => {
                let structure = self.structures.iter().find(|structure| structure.name == kind);
                let structure = structure.unwrap_or_else(|| panic!("no structure `{kind}`"));
                structure.fields.iter().map(|field| self.size(&field.kind)).sum()
            }
        }
    }

    fn header(&self) -> String {
        let mut text = String::from(HEAD);
        let mut add = |line: String| writeln!(text, "{line}").expect("a string");
        for name in CONSTANTS {
            let value = self.value(&self.constants[name]);
            let suffix = if value > u64::from(u32::MAX) { "ull" } else { "" };
            add(format!("#define TESSERA_{name} {value}{suffix}"));
        }
        for structure in self.in_order() {
            add(format!("\n{}struct {} {{", comment("", &structure.doc), c_name(&structure.name)));
            let mut at = 0;
            for field in &structure.fields {
                add(format!("{}    {}", comment("    ", &field.doc), self.declaration(field)));
                let aligned = at % self.alignment(&field.kind) == 0;
                assert!(aligned, "{}.{} has a hole before it", structure.name, field.name);
                at += self.size(&field.kind);
            }
            add("};".to_owned());
            self.add_assertions(structure, &mut add);
        }
        text + TAIL
    }

    /// The structures, each after those that it holds.
    fn in_order(&self) -> Vec<&Structure> {
        let holds = |structure: &Structure, other: &Structure| {
            let element = |field: &Field| {
                array(&field.kind).map_or(field.kind.clone(), |(kind, _)| kind.to_owned())
            };
            structure.fields.iter().any(|field| element(field) == other.name)
        };
        let mut ordered: Vec<&Structure> = Vec::new();
        let mut left: Vec<&Structure> = self.structures.iter().collect();
        while !left.is_empty() {
            let ready = |structure: &&Structure| !left.iter().any(|other| holds(structure, other));
            let (now, later): (Vec<_>, Vec<_>) =
                left.iter().partition(|structure| ready(structure));
            assert!(!now.is_empty(), "structures hold each other");
            ordered.extend(now);
            left = later;
        }
        ordered
    }

    fn add_assertions(&self, structure: &Structure, add: &mut impl FnMut(String)) {
        let name = c_name(&structure.name);
        let mut at = 0;
        for field in &structure.fields {
            if !field.name.starts_with("reserved") {
                add(format!("TESSERA_ASSERT(offsetof(struct {name}, {}) == {at});", field.name));
            }
            at += self.size(&field.kind);
        }
        add(format!("TESSERA_ASSERT(sizeof(struct {name}) == {at});"));
    }

    fn alignment(&self, kind: &str) -> u64 {
        match array(kind).map_or(kind, |(element, _)| element) {
            "u8" => 1,
            "u32" | "AtomicU32" => 4,
            _ => 8,
        }
    }

    fn declaration(&self, field: &Field) -> String {
        let (element, count) = array(&field.kind)
            .map_or((field.kind.as_str(), None), |(element, count)| (element, Some(count)));
        let element = match element {
            "u8" => "uint8_t".to_owned(),
            "u32" | "AtomicU32" => "uint32_t".to_owned(),
            "u64" | "AtomicU64" => "uint64_t".to_owned(),
            "AtomicI64" => "int64_t".to_owned(),
            structure => format!("struct {}", c_name(structure)),
        };
        let count = count.map(|count| format!("[{}]", self.value(count))).unwrap_or_default();
        format!("{element} {}{count};", field.name)
    }
}

const HEAD: &str = "/*
 * The two files that a container gets with every share of a GPU: /dev/tessera/<id>/grant, read-only, and /dev/tessera/<id>/ledger.
 *
 * Written by the test `header` of intercept/abi from its sources; do not edit. Numbers are little-endian. The grant changes in
 * place: copy it while `sequence` is even and the same before and after. Words of the ledger are written by other processes
 * at any time: read each with one atomic load, and write none. A file with another `abi_version` must not be used.
 */
#ifndef TESSERA_INTERCEPT_H
#define TESSERA_INTERCEPT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define TESSERA_ASSERT(condition) static_assert(condition, #condition)
#else
#define TESSERA_ASSERT(condition) _Static_assert(condition, #condition)
#endif

/* The first eight bytes of a grant, and of a ledger. */
#define TESSERA_GRANT_MAGIC \"TESGRANT\"
#define TESSERA_LEDGER_MAGIC \"TESLEDGR\"

/* Bytes that all processes have taken, from `total` of the ledger. */
#define TESSERA_USED_BYTES(total) ((uint64_t)(total) >> 21)

";

const TAIL: &str = "
#endif
";

/// `const NAME: type = value`, if the type is of numbers.
fn constant(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.trim_start_matches("pub ").strip_prefix("const ")?.split_once(": ")?;
    let (kind, value) = rest.split_once(" = ")?;
    let is_number = matches!(kind, "usize" | "u64" | "u32") && !value.starts_with("offset_of!");
    is_number.then_some((name, value))
}

fn fields(body: &[&str]) -> Vec<Field> {
    let (mut doc, mut found) = (Vec::new(), Vec::new());
    for line in body {
        if let Some(text) = line.strip_prefix("/// ") {
            doc.push(text.to_owned());
        } else if let Some((name, kind)) = line.trim_end_matches(',').split_once(": ") {
            let name = name.trim_start_matches("pub ").to_owned();
            found.push(Field { doc: std::mem::take(&mut doc), name, kind: kind.to_owned() });
        }
    }
    found
}

/// Element and count.
fn array(kind: &str) -> Option<(&str, &str)> {
    kind.strip_prefix('[')?.strip_suffix(']')?.split_once("; ")
}

fn operator<'a>(rest: &mut &str, of: &[&'a str]) -> Option<&'a str> {
    let text = rest.trim_start();
    let found = of.iter().find(|operator| text.starts_with(**operator))?;
    *rest = &text[found.len()..];
    Some(found)
}

/// `GrantPage` is `tessera_grant_page`.
fn c_name(name: &str) -> String {
    let mut text = String::from("tessera");
    for letter in name.chars() {
        if letter.is_uppercase() {
            text.push('_');
        }
        text.extend(letter.to_lowercase());
    }
    text
}

fn comment(indent: &str, doc: &[String]) -> String {
    let plain: Vec<_> = doc.iter().map(|line| line.replace(['[', ']', '`'], "")).collect();
    match &plain[..] {
        [] => String::new(),
        [one] => format!("{indent}/* {one} */\n"),
        many => {
            let text = many.join(&format!("\n{indent} * ")).replace("* \n", "*\n");
            format!("{indent}/* {text} */\n")
        }
    }
}

fn include() -> PathBuf {
    Path::new(CRATE).join("include")
}

fn assert_written(file: &str, text: &str) {
    let path = include().join(file);
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, text).expect("written");
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(written == text, "{} is out of date; if that is meant: UPDATE=1", path.display());
}

#[test]
fn the_header_is_up_to_date() {
    assert_written("tessera_intercept.h", &Sources::read().header());
}

/// The compiler defines the layout of structures: its sizes and offsets are compared.
#[test]
fn the_header_has_the_sizes_and_places_of_the_compiler() {
    let sources = Sources::read();
    for (structure, size) in [
        ("GrantPage", size_of::<GrantPage>()),
        ("LedgerPage", size_of::<LedgerPage>()),
        ("SlotPage", size_of::<SlotPage>()),
    ] {
        assert_eq!(sources.size(structure), size as u64, "{structure}");
    }
    let header = sources.header();
    for (place, at) in [
        ("tessera_grant_page, id", offset_of!(GrantPage, id)),
        ("tessera_grant_page, published", offset_of!(GrantPage, published)),
        ("tessera_ledger_page, total", offset_of!(LedgerPage, total)),
        ("tessera_ledger_page, compute", offset_of!(LedgerPage, compute)),
        ("tessera_ledger_page, unknown_functions", offset_of!(LedgerPage, unknown_functions)),
        ("tessera_ledger_page, slot", offset_of!(LedgerPage, slot)),
        ("tessera_slot_page, launches", offset_of!(SlotPage, launches)),
        ("tessera_slot_page, compute", offset_of!(SlotPage, compute)),
    ] {
        assert!(
            header.contains(&format!("TESSERA_ASSERT(offsetof(struct {place}) == {at});")),
            "{place}"
        );
    }
    for (name, value) in [
        ("ABI_VERSION", u64::from(ABI_VERSION)),
        ("GRANT_LEN", GRANT_LEN as u64),
        ("LEDGER_LEN", LEDGER_LEN as u64),
        ("SLOTS", ledger::SLOTS as u64),
    ] {
        assert!(header.contains(&format!("#define TESSERA_{name} {value}\n")), "{name}");
    }
}

#[test]
fn pkg_config_gives_what_a_compiler_needs() {
    let version = env!("CARGO_PKG_VERSION");
    let text = format!(
        "prefix=/usr\nincludedir=${{prefix}}/include\n\nName: tessera-intercept\nDescription: Layouts of the files that \
         Tessera gives a container with a share of a GPU\nVersion: {version}\nCflags: -I${{includedir}}\n"
    );
    assert_written("tessera-intercept.pc", &text);
}

#[test]
fn a_c_program_reads_a_grant_and_a_ledger() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let grant = Grant {
        gpu_uuid: "GPU-01020304-0506-0708-090a-0b0c0d0e0f10".parse().expect("a UUID"),
        memory_limit_bytes: 7 << 30,
        context_bytes: 300 << 20,
        cores_percent: 35,
        policy: ComputePolicy::Balance,
        oversubscribe: true,
        mps: false,
        claim_uid: Text::new("0b5f5c1e-9a61-4a0f-8d8c-52b0f2a6c7f1").expect("short"),
        id: Text::new("claim-0").expect("short"),
        sequence: 0,
    };
    fs::write(path("grant"), grant.encode().expect("in range")).expect("written");
    let mut bytes = vec![0; LEDGER_LEN];
    bytes[..24].copy_from_slice(&ledger::initial());
    let mut put = |at: usize, value: u64| bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    let total = ledger::Total { used_bytes: 5 << 30, slot: 3, change: 9 };
    put(offset_of!(LedgerPage, total), total.pack());
    put(offset_of!(LedgerPage, refused), 4);
    put(offset_of!(LedgerPage, unknown_functions), 2);
    let slot = offset_of!(LedgerPage, slot) + 3 * size_of::<SlotPage>();
    put(slot + offset_of!(SlotPage, state), u64::from(ledger::SLOT_LIVE) | 4711 << 32);
    put(slot + offset_of!(SlotPage, used_bytes), 5 << 30);
    fs::write(path("ledger"), bytes).expect("written");

    let source = Path::new(CRATE).join("tests/read.c");
    for (compiler, standard) in [("cc", "-std=c11"), ("c++", "-std=c++11")] {
        let program = path(compiler);
        let language = if compiler == "cc" { "c" } else { "c++" };
        let mut command = Command::new(compiler);
        command.args([standard, "-Wall", "-Wextra", "-Werror", "-I"]).arg(include());
        command.args(["-x", language]).arg(&source).arg("-o").arg(&program);
        assert!(command.status().expect("a C compiler runs").success(), "{compiler}");
        let output =
            Command::new(&program).args([path("grant"), path("ledger")]).output().expect("it runs");
        let text = String::from_utf8(output.stdout).expect("text");
        let expected = "claim-0 of 01020304: 7516192768 bytes, 35 percent, policy 2, may spill\n\
                        5368709120 bytes taken, 4 refused, 2 unknown\nslot 3: process 4711 has 5368709120 bytes\n";
        assert_eq!((text.as_str(), output.status.code()), (expected, Some(0)), "{compiler}");
    }
}

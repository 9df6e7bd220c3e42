// SPDX-License-Identifier: Apache-2.0
//! `check sizes`: how large files, functions, traits, structs, parameter lists and error enums may be.
//!
//! Lines are lines of code: blank lines and comments are free, and so are a file's inline test modules.

use anyhow::Result;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{
    Attribute, Block, FnArg, ImplItemFn, ItemEnum, ItemFn, ItemStruct, ItemTrait, Signature, TraitItem, TraitItemFn,
};

use crate::findings::Finding;
use crate::house::{self, House};
use crate::rust;
use crate::tree::{SourceFile, Tree};

/// Lines of code in a file: look again, fail.
const FILE: (usize, usize) = (600, 800);
/// Lines of code in a function: look again, fail.
const FUNCTION: (usize, usize) = (60, 120);
/// Lines of an inline test module above which it moves to a file of its own.
const TEST_MODULE: usize = 300;
/// Required methods of a trait.
const TRAIT_METHODS: usize = 12;
/// Fields of a struct whose layout is ours to choose.
const STRUCT_FIELDS: usize = 15;
/// Parameters of a function, `self` aside.
const PARAMETERS: usize = 6;
/// Kinds of one error type.
const ERROR_KINDS: usize = 10;

/// Runs the check on every Rust source of the tree.
pub fn check(tree: &Tree, house: &House) -> Result<Vec<Finding>> {
    let mut found: Vec<Finding> = tree.rust().flat_map(|file| measure(file, house)).collect();
    let gone = house.size.iter().filter(|entry| tree.file(&entry.file).is_none());
    found.extend(gone.map(|entry| Finding::breach(house::PATH, format!("{} is gone: drop the entry", entry.file))));
    Ok(found)
}

/// Measures one file.
fn measure(file: &SourceFile, house: &House) -> Vec<Finding> {
    let ast = match rust::parse(file) {
        Ok(ast) => ast,
        Err(finding) => return vec![finding],
    };
    let mut ruler = Ruler { file, house, found: Vec::new() };
    ruler.whole_file(&ast);
    ruler.visit_file(&ast);
    ruler.found
}

/// Walks one file and collects what is too large.
struct Ruler<'a> {
    file: &'a SourceFile,
    house: &'a House,
    found: Vec<Finding>,
}

impl Ruler<'_> {
    fn whole_file(&mut self, ast: &syn::File) {
        let text = &self.file.text;
        let tests = rust::test_modules(ast);
        for lines in &tests {
            let length = rust::code_lines(text, lines.clone());
            if length > TEST_MODULE {
                let advice =
                    format!("tests of {length} lines: move them to a tests.rs beside (more than {TEST_MODULE})");
                self.found.push(Finding::look(format!("{}:{}", self.file.path, lines.start()), advice));
            }
        }
        let all = rust::code_lines(text, 1..=usize::MAX);
        let in_tests: usize = tests.into_iter().map(|lines| rust::code_lines(text, lines)).sum();
        self.grade(None, 1, all - in_tests, FILE, "lines of code in one file");
    }

    /// A look above the first limit, a breach above the second, nothing where the house allows it.
    fn grade(&mut self, item: Option<&str>, line: usize, size: usize, limits: (usize, usize), what: &str) {
        let (look, fail) = limits;
        if size <= look || self.house.allows_size(&self.file.path, item) {
            return;
        }
        let name = item.map(|item| format!("{item}: ")).unwrap_or_default();
        let place = format!("{}:{line}", self.file.path);
        self.found.push(if size > fail {
            Finding::breach(place, format!("{name}{size} {what}, at most {fail}"))
        } else {
            Finding::look(place, format!("{name}{size} {what}, better below {look}"))
        });
    }

    /// A breach above one limit.
    fn cap(&mut self, item: &syn::Ident, size: usize, limit: usize, what: &str) {
        self.grade(Some(&item.to_string()), item.span().start().line, size, (limit, limit), what);
    }

    fn function(&mut self, signature: &Signature, body: &Block) {
        let (first, last) = (signature.span().start().line, body.span().end().line);
        let length = rust::code_lines(&self.file.text, first..=last);
        self.grade(Some(&signature.ident.to_string()), first, length, FUNCTION, "lines of code in one function");
    }

    fn parameters(&mut self, signature: &Signature) {
        let count = signature.inputs.iter().filter(|input| matches!(input, FnArg::Typed(_))).count();
        self.cap(&signature.ident, count, PARAMETERS, "parameters");
    }
}

impl<'ast> Visit<'ast> for Ruler<'_> {
    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.function(&item.sig, &item.block);
        self.parameters(&item.sig);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.function(&item.sig, &item.block);
        self.parameters(&item.sig);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        if let Some(body) = &item.default {
            self.function(&item.sig, body);
        }
        self.parameters(&item.sig);
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        let required =
            item.items.iter().filter(|item| matches!(item, TraitItem::Fn(method) if method.default.is_none())).count();
        self.cap(&item.ident, required, TRAIT_METHODS, "required methods in one trait");
        visit::visit_item_trait(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        if !attr_names(&item.attrs, "repr", "C") {
            self.cap(&item.ident, item.fields.len(), STRUCT_FIELDS, "fields in one struct");
        }
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        if attr_names(&item.attrs, "derive", "Error") {
            self.cap(&item.ident, item.variants.len(), ERROR_KINDS, "kinds of one error type");
        }
        visit::visit_item_enum(self, item);
    }
}

/// Whether the attribute `attr` lists `name`, as in `#[repr(C, packed)]` or `#[derive(thiserror::Error)]`.
fn attr_names(attrs: &[Attribute], attr: &str, name: &str) -> bool {
    let paths = syn::punctuated::Punctuated::<syn::Meta, syn::Token![,]>::parse_terminated;
    attrs.iter().filter(|candidate| candidate.path().is_ident(attr)).any(|candidate| {
        candidate.parse_args_with(paths).is_ok_and(|list| {
            list.iter().any(|meta| meta.path().segments.last().is_some_and(|last| last.ident == name))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(text: &str) -> Vec<String> {
        measured_with(text, &House::default())
    }

    fn measured_with(text: &str, house: &House) -> Vec<String> {
        let file = SourceFile { path: "a.rs".into(), text: text.into() };
        measure(&file, house).iter().map(ToString::to_string).collect()
    }

    fn function(lines: usize) -> String {
        format!("// comment\nfn long() {{\n{}}}\n", "    step();\n".repeat(lines - 2))
    }

    #[test]
    fn a_function_is_looked_at_and_then_refused() {
        assert!(measured(&function(60)).is_empty());
        assert_eq!(measured(&function(61)), ["look: a.rs:2: long: 61 lines of code in one function, better below 60"]);
        assert_eq!(measured(&function(121)), ["mend: a.rs:2: long: 121 lines of code in one function, at most 120"]);
    }

    #[test]
    fn methods_and_default_bodies_are_functions_too() {
        let body = "step();\n".repeat(130);
        assert_eq!(measured(&format!("impl X {{ fn f(&self) {{\n{body}}} }}")).len(), 1);
        assert_eq!(measured(&format!("trait X {{ fn f(&self) {{\n{body}}} }}")).len(), 1);
    }

    #[test]
    fn a_file_is_measured_without_its_tests() {
        let code = |lines: usize| "const A: u8 = 0;\n".repeat(lines);
        assert!(measured(&code(600)).is_empty());
        assert!(measured(&code(700))[0].starts_with("look: a.rs:1: 700 lines"));
        assert!(measured(&code(801))[0].starts_with("mend: a.rs:1: 801 lines"));
        let tested = format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", code(500), code(290));
        assert!(measured(&tested).is_empty());
        let tested = format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", code(500), code(400));
        assert!(measured(&tested)[0].contains("move them to a tests.rs"));
    }

    #[test]
    fn traits_structs_parameters_and_errors_have_limits() {
        let methods = |n: usize| (0..n).map(|i| format!("fn m{i}(&self);")).collect::<String>();
        assert!(measured(&format!("trait T {{ {} fn d(&self) {{}} }}", methods(12))).is_empty());
        assert!(measured(&format!("trait T {{ {} }}", methods(13)))[0].contains("13 required methods"));
        let fields = |n: usize| (0..n).map(|i| format!("f{i}: u8,")).collect::<String>();
        assert!(measured(&format!("struct S {{ {} }}", fields(15))).is_empty());
        assert!(measured(&format!("struct S {{ {} }}", fields(16)))[0].contains("16 fields"));
        assert!(measured(&format!("#[repr(C, packed)] struct S {{ {} }}", fields(40))).is_empty());
        assert!(measured(&format!("fn f({}) {{}}", fields(6))).is_empty());
        assert!(measured(&format!("fn f({}) {{}}", fields(7)))[0].contains("7 parameters"));
        assert!(measured(&format!("impl S {{ fn f(&self, {}) {{}} }}", fields(6))).is_empty());
        let kinds = |n: usize| (0..n).map(|i| format!("K{i},")).collect::<String>();
        assert!(measured(&format!("enum E {{ {} }}", kinds(30))).is_empty());
        assert!(
            measured(&format!("#[derive(Debug, thiserror::Error)] enum E {{ {} }}", kinds(11)))[0].contains("11 kinds")
        );
    }

    #[test]
    fn an_exception_lets_one_item_pass() {
        let house =
            House::parse("[[size]]\nfile = \"a.rs\"\nitem = \"long\"\nwhy = \"one table of opcodes\"\n").unwrap();
        assert!(measured_with(&function(130), &house).is_empty());
        let other = function(130).replace("long", "other");
        assert_eq!(measured_with(&other, &house).len(), 1);
    }

    #[test]
    fn a_file_that_does_not_parse_is_a_breach() {
        assert!(measured("fn f( {")[0].starts_with("mend: a.rs:1: does not parse"));
    }
}

// oracle runs the allocator of Kubernetes (dynamic-resource-allocation/structured)
// on scenarios in JSON form. See README.md.
package main

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"
)

const usage = `usage:
  oracle allocate [--max-steps N]              < scenarios        > answers
  oracle solve    [--max-steps N]              < scenarios        > scenarios with results, steps, allowed (= golden cases)
  oracle validate --node NAME [--result FILE]  < scenario           (result: AllocationResult list; default: the scenario's own results)
  oracle generate --seed N --count M --profile P                  > cases.jsonl   (P may be a comma list or "list")
  oracle check    golden.jsonl...                                 re-run upstream on stored cases, compare exactly, replay every fit
  oracle compare  --level L1|L2 golden.jsonl answers.jsonl        compare another engine's answers with stored cases
  oracle stats    golden.jsonl...                                 distribution table
  oracle bench    [--timeout 10s] [--json] [--scenario NAME]      < scenario
  oracle scenario NAME | list                                     > scenario
  oracle selectors                             < outcome TAB expression > the same lines with upstream's outcomes
Scenarios are read as a stream of JSON values (one document or JSON Lines).
`

func main() {
	klog.InitFlags(flag.NewFlagSet("klog", flag.ContinueOnError))
	klog.SetOutput(io.Discard)
	useVariants()
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	var err error
	switch args := os.Args[2:]; os.Args[1] {
	case "allocate":
		err = cmdAllocate(args)
	case "solve":
		err = cmdSolve(args)
	case "validate":
		err = cmdValidate(args)
	case "generate":
		err = cmdGenerate(args)
	case "check":
		err = cmdCheck(args)
	case "compare":
		err = cmdCompare(args)
	case "stats":
		err = cmdStats(args)
	case "bench":
		err = cmdBench(args)
	case "scenario":
		err = cmdScenario(args)
	case "selectors":
		err = cmdSelectors()
	default:
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "oracle:", err)
		os.Exit(1)
	}
}

// useVariants disables the "stable" variant. With the default features of 1.37
// upstream selects "incubating", whose semantics are also used for scenarios that
// disable features. "experimental" is selected if a scenario enables an alpha
// feature.
func useVariants() { structured.EnableAllocators("incubating", "experimental") }

// answer is one line of output of "allocate", and one line of input of "compare".
type answer struct {
	Name    string                `json:"name,omitempty"`
	Results map[string]NodeResult `json:"results"`
	Steps   map[string]int64      `json:"steps,omitempty"`
}

func newWriter() (*json.Encoder, *bufio.Writer) {
	w := bufio.NewWriterSize(os.Stdout, 1<<20)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e, w
}

func eachJSON[T any](r io.Reader, f func(*T) error) error {
	d := json.NewDecoder(bufio.NewReaderSize(r, 1<<20))
	for {
		v := new(T)
		if err := d.Decode(v); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := f(v); err != nil {
			return err
		}
	}
}

func eachFile[T any](paths []string, f func(path string, v *T) error) error {
	for _, p := range paths {
		file, err := os.Open(p)
		if err != nil {
			return err
		}
		var r io.Reader = file
		if strings.HasSuffix(p, ".gz") {
			if r, err = gzip.NewReader(file); err != nil {
				return err
			}
		}
		err = eachJSON(r, func(v *T) error { return f(p, v) })
		file.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	return nil
}

func cmdAllocate(args []string) error {
	fs := flag.NewFlagSet("allocate", flag.ExitOnError)
	maxSteps := fs.Int64("max-steps", 0, "abort the search on a node after this many allocateOne calls (0: never)")
	fs.Parse(args)
	e, w := newWriter()
	defer w.Flush()
	return eachJSON(os.Stdin, func(s *Scenario) error {
		if err := solve(s, *maxSteps); err != nil {
			return err
		}
		return e.Encode(answer{Name: s.Name, Results: s.Results, Steps: s.Steps})
	})
}

func cmdSolve(args []string) error {
	fs := flag.NewFlagSet("solve", flag.ExitOnError)
	maxSteps := fs.Int64("max-steps", 1_000_000, "abort the search on a node after this many allocateOne calls (0: never)")
	fs.Parse(args)
	e, w := newWriter()
	defer w.Flush()
	return eachJSON(os.Stdin, func(s *Scenario) error {
		if err := solve(s, *maxSteps); err != nil {
			return err
		}
		if err := fillAllowed(s, *maxSteps); err != nil {
			return err
		}
		return e.Encode(s)
	})
}

func cmdValidate(args []string) error {
	fs := flag.NewFlagSet("validate", flag.ExitOnError)
	node := fs.String("node", "", "node name (default: all nodes with a stored result)")
	result := fs.String("result", "", "file with a list of AllocationResult")
	fs.Parse(args)
	bad := 0
	err := eachJSON(os.Stdin, func(s *Scenario) error {
		cands := map[string][]resourceapi.AllocationResult{}
		if *result != "" {
			b, err := os.ReadFile(*result)
			if err != nil {
				return err
			}
			var c []resourceapi.AllocationResult
			if err := json.Unmarshal(b, &c); err != nil {
				return err
			}
			cands[*node] = c
		} else {
			for n, r := range s.Results {
				if r.Allocations != nil && (*node == "" || *node == n) {
					cands[n] = r.Allocations
				}
			}
		}
		for _, n := range sortedKeys(cands) {
			if err := validate(s, n, cands[n]); err != nil {
				bad++
				fmt.Printf("invalid\t%s\t%s\t%v\n", s.Name, n, err)
			} else {
				fmt.Printf("valid\t%s\t%s\n", s.Name, n)
			}
		}
		return nil
	})
	if err == nil && bad > 0 {
		err = fmt.Errorf("%d invalid", bad)
	}
	return err
}

func cmdGenerate(args []string) error {
	fs := flag.NewFlagSet("generate", flag.ExitOnError)
	seed := fs.Uint64("seed", 1, "seed")
	count := fs.Int("count", 10, "number of cases per profile")
	profile := fs.String("profile", "mixed", "profile, comma separated list, or \"list\"")
	fs.Parse(args)
	if *profile == "list" {
		fmt.Println(strings.Join(sortedKeys(profiles), "\n"))
		return nil
	}
	e, w := newWriter()
	defer w.Flush()
	for _, p := range strings.Split(*profile, ",") {
		for i := 0; i < *count; i++ {
			s, err := generate(p, *seed, i)
			if err != nil {
				return err
			}
			if err := e.Encode(s); err != nil {
				return err
			}
		}
	}
	return nil
}

func cmdCheck(args []string) error {
	cases, nodes, bad, replayed := 0, 0, 0, 0
	err := eachFile(args, func(path string, s *Scenario) error {
		cases++
		fresh := clone(*s)
		if err := solve(&fresh, 0); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		// The golden results went through JSON, so convert these, too.
		fresh.Results = clone(fresh.Results)
		nodes += len(s.Results)
		for _, err := range compareAll(s, fresh.Results, "L2") {
			bad++
			fmt.Println("L2", err)
		}
		for _, n := range sortedKeys(s.Results) {
			if s.Results[n].Err != nil && fresh.Results[n].Err != nil && s.Results[n].Err.Error != fresh.Results[n].Err.Error {
				bad++
				fmt.Println("error text differs:", s.Name, n)
			}
			if s.Results[n].Allocations == nil {
				continue
			}
			replayed++
			if err := validate(s, n, s.Results[n].Allocations); err != nil {
				bad++
				fmt.Println("replay", s.Name, n, err)
			}
		}
		return nil
	})
	fmt.Printf("%d cases, %d node results, %d fits replayed, %d problems\n", cases, nodes, replayed, bad)
	if err == nil && bad > 0 {
		err = fmt.Errorf("%d checks failed", bad)
	}
	return err
}

func cmdCompare(args []string) error {
	fs := flag.NewFlagSet("compare", flag.ExitOnError)
	level := fs.String("level", "L2", "L1 (feasibility, replay) or L2 (exact)")
	quiet := fs.Bool("quiet", false, "only the summary")
	strictRank := fs.Bool("strict-rank", false, "L1: a worse firstAvailable choice than upstream's is an error")
	fs.Parse(args)
	if fs.NArg() != 2 || (*level != "L1" && *level != "L2") {
		return fmt.Errorf("need --level L1|L2 and two files: golden, answers")
	}
	golden := map[string]*Scenario{}
	if err := eachFile(fs.Args()[:1], func(_ string, s *Scenario) error { golden[s.Name] = s; return nil }); err != nil {
		return err
	}
	seen := map[string]bool{}
	good, bad, worse := 0, 0, 0
	if err := eachFile(fs.Args()[1:], func(_ string, a *answer) error {
		s, ok := golden[a.Name]
		if !ok {
			return fmt.Errorf("answer for unknown case %q", a.Name)
		}
		seen[a.Name] = true
		errs := compareAll(s, a.Results, *level)
		for _, n := range sortedKeys(a.Results) {
			if *level == "L1" && rankWorse(s, s.Results[n], a.Results[n]) {
				worse++
				if *strictRank {
					errs = append(errs, fmt.Errorf("%s: node %s: firstAvailable choice worse than upstream's", s.Name, n))
				}
			}
		}
		if len(errs) == 0 {
			good++
			return nil
		}
		bad++
		if !*quiet {
			for _, e := range errs {
				fmt.Println(e)
			}
		}
		return nil
	}); err != nil {
		return err
	}
	missing := len(golden) - len(seen)
	fmt.Printf("%s: %d cases agree, %d differ, %d without answer; %d node results with a worse firstAvailable choice than upstream\n", *level, good, bad, missing, worse)
	if bad+missing > 0 {
		return fmt.Errorf("answers differ")
	}
	return nil
}

func cmdStats(args []string) error {
	type row struct{ cases, fit, none, err, nodes, nfit, nnone, nerr, back, multi, dep int }
	rows := map[string]*row{}
	classes := map[string]int{}
	err := eachFile(args, func(_ string, s *Scenario) error {
		for _, name := range []string{s.Profile, "~total"} {
			r := rows[name]
			if r == nil {
				r = &row{}
				rows[name] = r
			}
			r.cases++
			switch scenarioOutcome(s) {
			case "fit":
				r.fit++
			case "none":
				r.none++
			default:
				r.err++
			}
			if backtracked(s) {
				r.back++
			}
			if len(s.Allowed) > 0 {
				r.dep++
			}
			many := false
			for _, n := range s.Results {
				r.nodes++
				switch {
				case n.Err != nil:
					r.nerr++
					if name == "~total" {
						classes[n.Err.Class]++
					}
				case n.Allocations == nil:
					r.nnone++
				default:
					r.nfit++
				}
				d := 0
				for _, a := range n.Allocations {
					d += len(a.Devices.Results)
				}
				many = many || d > 1
			}
			if many {
				r.multi++
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	pct := func(a, b int) int {
		if b == 0 {
			return 0
		}
		return (200*a + b) / (2 * b)
	}
	fmt.Println("| profile | cases | fits somewhere % | fits nowhere % | error % | node results | fit/none/error % | >1 device % | backtracking % | order-dependent outcome |")
	fmt.Println("|---|---|---|---|---|---|---|---|---|---|")
	for _, p := range sortedKeys(rows) {
		r := rows[p]
		fmt.Printf("| %s | %d | %d | %d | %d | %d | %d/%d/%d | %d | %d | %d |\n", strings.TrimPrefix(p, "~"), r.cases, pct(r.fit, r.cases), pct(r.none, r.cases), pct(r.err, r.cases),
			r.nodes, pct(r.nfit, r.nodes), pct(r.nnone, r.nodes), pct(r.nerr, r.nodes), pct(r.multi, r.cases), pct(r.back, r.cases), r.dep)
	}
	fmt.Print("\nError classes (node results):")
	for _, c := range sortedKeys(classes) {
		fmt.Printf(" %s %d;", c, classes[c])
	}
	fmt.Println()
	return nil
}

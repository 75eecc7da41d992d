// Writes the goldens for quantities: what k8s.io/apimachinery makes of a text. Run in a module that requires it:
//
//	go run generate.go > golden.jsonl
//
// One JSON object per line: the text; and either "error", or the canonical form, the exact decimal, Value and MilliValue.
// Value and MilliValue are left out where they do not fit an int64.
package main

import (
	"encoding/json"
	"fmt"
	"math/big"
	"math/rand"
	"os"

	inf "gopkg.in/inf.v0"
	"k8s.io/apimachinery/pkg/api/resource"
)

type line struct {
	Text      string `json:"text"`
	Error     bool   `json:"error,omitempty"`
	Canonical string `json:"canonical,omitempty"`
	Nano      string `json:"nano,omitempty"`
	Value     *int64 `json:"value,omitempty"`
	Milli     *int64 `json:"milli,omitempty"`
}

var suffixes = []string{"", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei",
	"e0", "e3", "E3", "e-3", "e+6", "e9", "e-9", "e-10", "e12", "e1", "e-1", "e5"}

var odd = []string{"", "-", "+", ".", "-.", "+.", "Mi", "-Mi", "k", "e3", "e-9", "e-10", "1e", "1E", "1i", "1ki", "1K", "1mi",
	"1 ", " 1", "1.2.3", "--1", "+-1", "1-", "1+", "1e+", "1e-", "1ee3", "1e3k", "1k3", "0x10", "1_000", "1,5", "½", "１",
	"1Kii", "1KiB", "1MB", "1gi", "1Gi ", "NaN", "inf", "1e1.5", ".5.", "5.", ".5", "-5.", "0", "00", "-0", "+0", "0.0", "0Mi",
	"0.0Ki", "007", "0000012Mi", "1.0000000001", "0.0000000001", "-0.0000000001", "0.00000000099", "1.9999999999n",
	"9223372036854775807", "9223372036854775808", "-9223372036854775808", "8Ei", "7Ei", "9Ei", "100Ei", "-8Ei", "0.5Ei",
	"123456789012345678901234567890n", "0.000000000000000000000000000000001Ei", "0.1234567890123456789012345678901234Gi",
	"1000E", "0.9Ki", "0.0009Ki", "1023", "1023.5Ki", "1025Ki", "1024Ki", "1536Mi", "1.5Gi", "81559Mi", "0.1Ki", "1.1Ki"}

func main() {
	out := json.NewEncoder(os.Stdout)
	out.SetEscapeHTML(false)
	random := rand.New(rand.NewSource(1))
	texts := append([]string{}, odd...)
	for _, suffix := range suffixes {
		for _, number := range []string{"0", "1", "-1", "+2", "10", "1000", "1024", "1023", "999", "0.5", "1.5", "-2.25", "100", "12300", "0.001"} {
			texts = append(texts, number+suffix)
		}
		for i := 0; i < 30; i++ {
			texts = append(texts, number(random)+suffix)
		}
	}
	for _, text := range texts {
		if err := out.Encode(describe(text)); err != nil {
			panic(err)
		}
	}
}

func number(random *rand.Rand) string {
	text := []string{"", "", "-", "+"}[random.Intn(4)]
	for i := random.Intn(14); i >= 0; i-- {
		text += fmt.Sprint(random.Intn(10))
	}
	if random.Intn(2) == 0 {
		text += "."
		for i := random.Intn(14); i > 0; i-- {
			text += fmt.Sprint(random.Intn(10))
		}
	}
	return text
}

func describe(text string) line {
	parsed, err := resource.ParseQuantity(text)
	if err != nil {
		return line{Text: text, Error: true}
	}
	number, suffix := parsed.CanonicalizeBytes(nil)
	described := line{Text: text, Canonical: string(number) + string(suffix)}
	exact := new(inf.Dec).Set(parsed.AsDec())
	nano := new(inf.Dec).Mul(exact, inf.NewDec(1000000000, 0))
	described.Nano = new(inf.Dec).Round(nano, 0, inf.RoundExact).String()
	for scale, field := range map[int64]**int64{1: &described.Value, 1000: &described.Milli} {
		scaled := new(inf.Dec).Mul(exact, inf.NewDec(scale, 0))
		rounded := new(inf.Dec).Round(scaled, 0, inf.RoundUp).UnscaledBig()
		if rounded.CmpAbs(big.NewInt(1<<62)) < 0 {
			value := rounded.Int64()
			*field = &value
		}
	}
	return described
}

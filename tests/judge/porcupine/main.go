// Reads histories of a lease, one JSON array of [invoked, returned, kind, session, token] a line, and prints for each
// whether Porcupine finds it linearizable.  Run by cross_check.py; a tool for developers, not part of any test.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	"github.com/anishathalye/porcupine"
)

type call struct {
	Kind, Session string
	Token         int64
}

type lease struct {
	Session string
	Token   int64
}

var model = porcupine.Model{
	Init: func() interface{} { return lease{} },
	Step: func(state, input, _ interface{}) (bool, interface{}) {
		now, made := state.(lease), input.(call)
		if made.Kind == "observe" {
			if now.Session != "" {
				return now == lease{made.Session, made.Token}, now
			}
			return made.Token > now.Token, lease{made.Session, made.Token}
		}
		if now.Session == made.Session && (made.Token == 0 || made.Token == now.Token) {
			return true, lease{"", now.Token}
		}
		return true, now
	},
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(make([]byte, 1<<20), 1<<28)
	for lines.Scan() {
		var history [][5]json.RawMessage
		if err := json.Unmarshal(lines.Bytes(), &history); err != nil {
			panic(err)
		}
		operations := make([]porcupine.Operation, len(history))
		for at, fields := range history {
			var made call
			var invoked, returned int64
			for index, target := range []interface{}{&invoked, &returned, &made.Kind, &made.Session, &made.Token} {
				if err := json.Unmarshal(fields[index], target); err != nil {
					panic(err)
				}
			}
			operations[at] = porcupine.Operation{ClientId: at, Input: made, Call: invoked, Return: returned}
		}
		fmt.Println(porcupine.CheckOperations(model, operations))
	}
}

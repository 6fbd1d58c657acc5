package natslog;

import java.io.IOException;
import java.io.Serializable;
import java.nio.charset.CharacterCodingException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.net.ssl.SSLContext;

/**
 * How to log in to NATS, as `natslog.wire.credentials` does: files are named here, and read for each connection, so that
 * a file can be replaced. No error contains anything that was read.
 */
record NatsLogin(
    String credsFile, String nkeyFile, String user, String userFile, String passwordFile, String tokenFile,
    String tlsCaFile, String tlsCertFile, String tlsKeyFile, boolean isHandshakeFirst) implements Serializable {
  static final List<String> OPTIONS = List.of(
      "natsCredsFile", "natsNkeyFile", "natsUser", "natsUserFile", "natsPasswordFile", "natsTokenFile",
      "natsTlsCaFile", "natsTlsCertFile", "natsTlsKeyFile", "natsTlsHandshakeFirst");

  private static final int MOST_BYTES = 1024 * 1024;
  private static final Pattern JWT =
      Pattern.compile("-+BEGIN NATS USER JWT-+\\s+([\\w.-]+)\\s+-+END NATS USER JWT-+");
  private static final Pattern SEED = Pattern.compile("-+BEGIN USER NKEY SEED-+\\s+([A-Z0-9]+)\\s+-+END USER NKEY SEED-+");

  static NatsLogin of(Given given) {
    NatsLogin found = new NatsLogin(
        given.text("natsCredsFile"), given.text("natsNkeyFile"), given.text("natsUser"), given.text("natsUserFile"),
        given.text("natsPasswordFile"), given.text("natsTokenFile"), given.text("natsTlsCaFile"),
        given.text("natsTlsCertFile"), given.text("natsTlsKeyFile"), given.flag("natsTlsHandshakeFirst", false));
    found.checkTogether();
    return found;
  }

  private void checkTogether() {
    if (tlsKeyFile != null && tlsCertFile == null) {
      throw NatslogException.config("option natsTlsKeyFile requires natsTlsCertFile: set both");
    }
    if (user != null && userFile != null) {
      throw NatslogException.config("give either the NATS user or the user file: both were given");
    }
    if ((user != null || userFile != null) != (passwordFile != null)) {
      throw NatslogException.config(
          "the NATS user and the file with the password belong together: give both (a user or a user file, and a "
              + "password file), or none");
    }
    List<String> ways = new ArrayList<>();
    if (credsFile != null) {
      ways.add("credentials file");
    }
    if (nkeyFile != null) {
      ways.add("nkey file");
    }
    if (passwordFile != null) {
      ways.add("user with password file");
      if (tokenFile != null) { // beside a JWT or nkey, it is for an auth callout
        ways.add("token file");
      }
    }
    if (ways.size() > 1) {
      throw NatslogException.config(
          "a NATS server takes only one login: remove all but one of " + String.join(", ", ways));
    }
  }

  /** Reads all files. @throws NatslogException one cannot be read, or is of another kind */
  void check() {
    fields(null);
    tls();
  }

  /** Whether nothing may be sent to a server without TLS. */
  boolean wantsTls() {
    return tlsCaFile != null || tlsCertFile != null || isHandshakeFirst;
  }

  SSLContext tls() {
    return Tls.context(tlsCaFile, tlsCertFile, tlsKeyFile == null ? tlsCertFile : tlsKeyFile);
  }

  /** What CONNECT states. @param nonce of the server, or null */
  Map<String, Object> fields(String nonce) {
    Map<String, Object> found = new HashMap<>();
    if (passwordFile != null) {
      found.put("user", userFile == null ? user : text(userFile, "NATS user file"));
      found.put("pass", text(passwordFile, "NATS password file"));
    }
    if (tokenFile != null) {
      found.put("auth_token", text(tokenFile, "NATS token file"));
    }
    try {
      if (credsFile != null) {
        String text = text(credsFile, "NATS credentials file");
        Matcher jwt = JWT.matcher(text);
        Matcher seed = SEED.matcher(text);
        Nkeys key = jwt.find() && seed.find() ? Nkeys.ofUser(seed.group(1)) : null;
        if (key == null) {
          throw NatslogException.config(
              credsFile + " is no NATS credentials file: it must hold a JWT and an nkey seed of a user, each between a "
                  + "BEGIN and an END line (nsc generate creds writes one)");
        }
        found.put("jwt", jwt.group(1));
        found.put("sig", key.signature(nonce == null ? "" : nonce));
      }
      if (nkeyFile != null) {
        Nkeys key = Nkeys.ofUser(text(nkeyFile, "NATS nkey file"));
        if (key == null) {
          throw NatslogException.config(
              nkeyFile + " is no nkey seed of a user: it must hold one line that begins with SU (nk -gen user writes "
                  + "it)");
        }
        found.put("nkey", key.publicKey());
        found.put("sig", key.signature(nonce == null ? "" : nonce));
      }
    } catch (GeneralSecurityException error) {
      throw NatslogException.config("this Java has no Ed25519, which nkeys need: use another one, of version 17 or newer");
    }
    return found;
  }

  private static String text(String path, String what) {
    String text;
    try {
      if (Files.size(Path.of(path)) > MOST_BYTES) {
        throw NatslogException.config("the " + what + " " + path + " is larger than " + MOST_BYTES + " bytes: correct it");
      }
      text = Files.readString(Path.of(path)).strip();
    } catch (CharacterCodingException error) {
      throw NatslogException.config("the " + what + " " + path + " is not UTF-8 text: correct it");
    } catch (IOException error) {
      throw NatslogException.config("cannot read the " + what + " " + path + ": " + error.getClass().getSimpleName());
    }
    if (text.isEmpty()) {
      throw NatslogException.config("the " + what + " " + path + " is empty: write one line into it");
    }
    return text;
  }

  /** What to correct where the server refuses the login. */
  String remedy() {
    String token = tokenFile == null ? "" : "the token in " + tokenFile;
    String more = token.isEmpty() ? "" : " or " + token;
    if (credsFile != null) {
      return "correct the credentials file " + credsFile + more;
    }
    if (nkeyFile != null) {
      return "correct the nkey seed in " + nkeyFile + more;
    }
    if (passwordFile != null) {
      String who = userFile != null ? "the user in " + userFile : "the user '" + user + "'";
      return "correct " + who + " or the password in " + passwordFile;
    }
    return token.isEmpty() ? "correct user and password in the URL, or give credentials" : "correct " + token;
  }

  /** What to correct where TLS fails. */
  String tlsRemedy() {
    String ca = tlsCaFile != null ? "correct the CA file " + tlsCaFile : "give the CA file of the server";
    String certificate = tlsCertFile != null
        ? "correct the client certificate " + tlsCertFile + ": it must be of a CA that the server accepts"
        : "if the server requires one, give a client certificate of a CA that it accepts";
    return ca + ", and use a host in the URL that the certificate is for; " + certificate;
  }
}
